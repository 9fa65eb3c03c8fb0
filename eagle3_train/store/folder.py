"""One folder, local or in an object store: list, read ranges, write whole files that appear at once or not at all."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.fs as pafs

from eagle3_train.files import filesystem, inside, is_uri


class Folder:
    """`uri`: a local path, or whatever `pyarrow.fs` opens by itself (s3://, gs://, hdfs://) or through fsspec."""

    def __init__(self, uri: str | Path) -> None:
        self.uri = str(uri)
        self._base = self.uri.partition("?")[0] if is_uri(self.uri) else self.uri
        if is_uri(self.uri):
            self.fs, self.root = filesystem(self.uri)
        else:
            self.fs = pafs.LocalFileSystem()
            self.root = os.path.abspath(os.path.expanduser(self.uri))
        self.is_local = isinstance(self.fs, pafs.LocalFileSystem)

    def path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def show(self, name: str) -> str:
        """The file as a person would write it, for messages."""
        return f"{self._base.rstrip('/')}/{name}"

    def child(self, name: str) -> Folder:
        return Folder(inside(self.uri, name))

    def sizes(self) -> dict[str, int]:
        """Names of the files in the folder itself -> bytes; empty where there is no such folder."""
        try:
            infos = self.fs.get_file_info(pafs.FileSelector(self.root, recursive=False, allow_not_found=True))
        except FileNotFoundError:  # Arrow's, of a local folder that another process made while it looked
            return {}
        return {i.base_name: i.size for i in infos if i.type == pafs.FileType.File}

    def open(self, name: str) -> pa.NativeFile:
        return self.fs.open_input_file(self.path(name))

    def read(self, name: str) -> bytes:
        with self.open(name) as f:
            return f.read()

    def write(self, name: str, data: bytes, exclusive: bool = False) -> None:
        with self.create(name, exclusive) as f:
            f.write(data)

    def remove(self, name: str) -> None:
        self.fs.delete_file(self.path(name))

    @contextmanager
    def create(self, name: str, exclusive: bool = False) -> Iterator[BinaryIO]:
        """A file to write; it appears under `name`, whole and durable, when the block ends without an exception.

        Local: a temporary file beside it, fsync, rename, fsync of the folder. Object store: a temporary file on
        this machine, then one upload, since a half-made upload cannot be taken back through every client.

        exclusive: what has the name already keeps it (FileExistsError at the end of the block). Of several processes
        one gets it, where the file system has hard links (NFS has); elsewhere one looks just before.
        """
        if self.is_local:
            os.makedirs(self.root, exist_ok=True)
            self._remove_dead(name)
        directory = self.root if self.is_local else tempfile.gettempdir()
        temporary = f"{directory}/.{name}.{socket.gethostname()}.{uuid.uuid4().hex[:12]}.tmp"
        try:
            with _open_locked(temporary) as f:
                yield f
                if self.is_local:
                    os.fsync(f.fileno())
                    (self._link if exclusive else self._rename)(temporary, name)
                else:
                    if exclusive and self._is_there(name):
                        raise FileExistsError(self.show(name))
                    self._upload(temporary, name)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def _rename(self, temporary: str, name: str) -> None:
        try:
            os.replace(temporary, self.path(name))
        except FileNotFoundError:
            # A finished store was swept while this writer redid a file of it: that file, with equal bytes, is there.
            if not os.path.exists(self.path(name)):
                raise
        _sync_folder(self.root)

    def _link(self, temporary: str, name: str) -> None:
        try:
            os.link(temporary, self.path(name))
        except OSError as e:
            if os.path.exists(self.path(name)):
                raise FileExistsError(self.show(name)) from e
            if isinstance(e, FileNotFoundError):
                raise
            os.replace(temporary, self.path(name))  # no hard links here; whatever else is wrong, it says so too
        _sync_folder(self.root)

    def _is_there(self, name: str) -> bool:
        return bool(self.fs.get_file_info(self.path(name)).type == pafs.FileType.File)

    def _upload(self, temporary: str, name: str) -> None:
        try:
            with open(temporary, "rb") as source, self.fs.open_output_stream(self.path(name)) as sink:
                shutil.copyfileobj(source, sink, 16 << 20)
        except BaseException:
            if self._is_there(name):
                self.remove(name)
            raise

    def _remove_dead(self, name: str) -> None:
        """Remove what killed writers of `name` on this host left: their lock is gone with them."""
        for path in Path(self.root).glob(f".{name}.{socket.gethostname()}.*.tmp"):
            try:
                with open(path, "rb") as f:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
            except OSError:
                continue  # a living writer's, just renamed, or a file system without locks

    def remove_temporaries(self, prefix: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Remove the unfinished files of that prefix whose final name is `wanted`, whoever's they are: only where no
        other process writes them."""
        if self.is_local:
            for path in Path(self.root).glob(f".{prefix}*.tmp"):
                if wanted(path.name[1:]):
                    path.unlink(missing_ok=True)


def _open_locked(path: str) -> BinaryIO:
    """A new file with a lock that lives as long as its writer, so that `_remove_dead` knows the dead ones."""
    while True:
        f = open(path, "xb", buffering=0)  # noqa: SIM115
        with suppress(OSError):  # a file system without locks: nothing is swept there before the store is finished
            fcntl.flock(f, fcntl.LOCK_SH)
        if os.fstat(f.fileno()).st_nlink:
            return f  # type: ignore[return-value]
        f.close()  # swept between its creation and its lock


def _sync_folder(path: str) -> None:
    """Make a rename durable: the name is the folder's content, not the file's."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RangeReader:
    """Byte ranges of one file, from any thread. The file is closed when the last user lets go of this object."""

    def __init__(self, folder: Folder, name: str) -> None:
        self.where = folder.show(name)
        if folder.is_local:
            local = open(folder.path(name), "rb", buffering=0)  # noqa: SIM115
            self._read: Callable[[list[memoryview], int], int] = partial(_read_local, local)
        else:
            self._read = partial(_read_remote, folder.open(name))

    def read_into(self, offset: int, parts: list[memoryview]) -> None:
        """Fill `parts`, one after the other, with the bytes from `offset` on. EOFError: the file is cut."""
        size = sum(map(len, parts))
        got = self._read(parts, offset)
        if got != size:
            raise EOFError(f"{self.where} ends {size - got} bytes too early")


def _read_local(file: io.FileIO, parts: list[memoryview], offset: int) -> int:
    return os.preadv(file.fileno(), parts, offset)  # moves up to 2 GiB at once, more than a row may have


def _read_remote(file: pa.NativeFile, parts: list[memoryview], offset: int) -> int:
    data = file.read_at(sum(map(len, parts)), offset)
    done = 0
    for part in parts:
        piece = data[done : done + len(part)]
        part[: len(piece)] = piece
        done += len(piece)
    return done
