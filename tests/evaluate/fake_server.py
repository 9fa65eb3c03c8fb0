"""A server with vLLM's interface, or SGLang's, that knows what it will say, and in which cycles."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """`texts`: what it says to each prompt. `cycles`: accepted drafts of each target forward after the prompt's, whole
    drafts of `steps` to the last; None: it has no draft head. `tells`: of each request too, as vLLM does when asked to.
    `others`: tokens that it generates meanwhile for somebody else. `sglang`: it has SGLang's endpoint too, and says
    there in how many forwards, and how many of them accepted how much; `cumulative`: each event has all tokens."""

    daemon_threads = True

    def __init__(
        self, texts: dict[tuple[int, ...], list[int]], cycles: dict[tuple[int, ...], list[int]] | None, steps: int = 3,
        tells: bool = True, others: int = 0, sglang: bool = False, cumulative: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(("127.0.0.1", 0), Handler)
        self.texts, self.cycles, self.steps, self.tells, self.others = texts, cycles, steps, tells, others
        self.sglang, self.cumulative = sglang, cumulative
        self.lock = threading.Lock()
        self.running = self.most_running = 0
        self.requests: list[dict[str, Any]] = []
        self.generated = 0
        self.accepted_at: list[int] = []  # of every cycle so far

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def metrics(self) -> str:
        lines = [
            "# HELP vllm:generation_tokens_total x",
            f'vllm:generation_tokens_total{{engine="0"}} {self.generated}.0',
        ]
        if self.cycles is not None:
            name, n = "vllm:spec_decode_num", len(self.accepted_at)
            lines += [f'{name}_drafts_total{{engine="0"}} {n}.0', f'{name}_draft_tokens_total{{engine="0"}} {n * 3}.0']
            lines += [f'{name}_accepted_tokens_total{{engine="0"}} {sum(self.accepted_at)}.0']
            for i in range(self.steps):
                count = sum(a > i for a in self.accepted_at)
                lines.append(f'{name}_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {count}.0')
        return "\n".join(lines) + "\n"


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        bodies = {
            "/health": "",
            "/v1/models": json.dumps({"data": [{"id": "fake"}]}),
            "/metrics": self.server.metrics(),
        }
        if self.server.sglang:
            bodies["/get_model_info"] = json.dumps({"model_path": "fake"})
        body = bodies.get(self.path)
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write((body or "").encode())

    def do_POST(self) -> None:
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(request)
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        native = self.path == "/generate"
        prompt = tuple(request["input_ids" if native else "prompt"])
        limit = request["sampling_params"]["max_new_tokens"] if native else request["max_tokens"]
        time.sleep(0.03)  # so that requests sent together run together
        tokens = server.texts[prompt][:limit]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        said: list[int] = []
        sent = 1
        self._say(native, tokens, 0, 1, said)
        for a in (server.cycles or {}).get(prompt, [0] * len(tokens)):
            if sent >= len(tokens):
                break
            start, sent = sent, min(sent + a + 1, len(tokens))
            said.append(a)
            self._say(native, tokens, start, sent, said)
        final: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": sent}}
        if server.cycles is not None and server.tells:
            final["metrics"] = {"speculative_decoding": {"per_step_accepted": said}}
        with server.lock:
            server.running -= 1
            server.generated += sent + server.others
            server.accepted_at += said
        if not native:
            self._send(final)
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, native: bool, tokens: list[int], start: int, end: int, said: list[int]) -> None:
        new = tokens[start:end]
        if not native:
            self._send({"choices": [{"text": "a" * len(new), "token_ids": new}]})
            return
        meta: dict[str, Any] = {"completion_tokens": end}
        if self.server.cycles is not None and end == len(tokens):  # SGLang says it of finished requests
            meta["spec_verify_ct"] = len(said)
            meta["spec_accept_histogram"] = [said.count(a) for a in range(max(said, default=0) + 1)]
        self._send(
            {"text": "a" * end, "output_ids": tokens[:end] if self.server.cumulative else new, "meta_info": meta}
        )

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()
