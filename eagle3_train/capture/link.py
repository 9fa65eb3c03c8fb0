"""Hidden states on their way from the process that computes them to the one that writes the store.

A Unix socket in a private folder carries frames: a header (key, tokens), then the bytes of [tokens, layers, H]. No file
and no lock for a request, and the socket's own buffer is what holds a sender back that is too fast.
"""

from __future__ import annotations

import socket
import struct
import tempfile
import threading
from pathlib import Path
from queue import SimpleQueue

import torch

HEADER = struct.Struct("<qq")  # key, tokens
SOCKET = "states"
AHEAD = 64  # sequences between the forward pass and the socket


class Receiver:
    """Context manager: listens, and gathers what comes until it is taken. `address`: where a `Sender` connects to.

    The states of one token are a tensor [layers, H] of `dtype`.
    """

    def __init__(self, layers: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._shape, self._dtype = (layers, hidden_size), dtype
        self._folder = tempfile.TemporaryDirectory(prefix="eagle3-")  # mode 0700
        self.address = str(Path(self._folder.name) / SOCKET)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(1)
        self._here: dict[int, torch.Tensor] = {}
        self._news = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._receive, name="hidden-states", daemon=True)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A thread in accept() is not woken by close(); a connection that ends at once does it.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wake:
            wake.connect(self.address)
        self._listener.close()
        self._thread.join(timeout=10)
        self._folder.cleanup()

    def take(self, key: int) -> torch.Tensor:
        """States of `key` [T, layers, H]; waits for them as long as the connection lasts.

        Raises:
            RuntimeError: the sender is gone.
        """
        with self._news:
            while key not in self._here:
                if self._ended:
                    raise RuntimeError("the process that computes hidden states ended before it had sent them all")
                self._news.wait()
            return self._here.pop(key)

    def _receive(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            header = memoryview(bytearray(HEADER.size))
            while _fill(connection, header):
                key, n_tokens = HEADER.unpack(header)
                states = torch.empty((n_tokens, *self._shape), dtype=self._dtype)
                if not _fill(connection, states.view(torch.uint8).flatten().numpy().data):
                    break
                with self._news:
                    self._here[key] = states
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


def _fill(connection: socket.socket, into: memoryview) -> bool:
    """Read exactly `into`; False where the connection ends first."""
    done = 0
    while done < len(into):
        got = connection.recv_into(into[done:])
        if got == 0:
            return False
        done += got
    return True


class Sender:
    """Sends states from a thread of its own, so that the next forward pass need not wait for them."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address)
        self._queue: SimpleQueue[tuple[int, torch.Tensor, torch.cuda.Event | None] | None] = SimpleQueue()
        self._room = threading.BoundedSemaphore(AHEAD)
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._send, name="hidden-states", daemon=True)
        self._thread.start()

    def send(self, key: int, states: torch.Tensor, copied: torch.cuda.Event | None = None) -> None:
        """Queue `states` [T, layers, H], contiguous and on the CPU; `copied`: when their copy from the GPU is complete.

        Waits while `AHEAD` others are queued. Raises the error of an earlier one.
        """
        self._room.acquire()
        if self._error is not None:
            raise self._error
        self._queue.put((key, states, copied))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._socket.close()

    def _send(self) -> None:
        while (item := self._queue.get()) is not None:
            key, states, copied = item
            if copied is not None:
                copied.synchronize()
            try:
                if self._error is None:
                    self._socket.sendall(HEADER.pack(key, len(states)))
                    self._socket.sendall(states.view(torch.uint8).flatten().numpy().data)
            except OSError as e:  # the writer is gone
                self._error = e
            self._room.release()
