"""SGLang's own endpoint, which says of each request how many target forwards it took; its OpenAI one says nothing.

Names: SGLang 0.4 to 0.5. Not run against a real server here, which needs a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from eagle3_train.evaluate.serve.client import Answer, Prompt, events, get
from eagle3_train.evaluate.serve.counters import Counters

HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")  # newer and older name


def is_sglang(url: str) -> bool:
    """Whether SGLang listens there: no other server has this path."""
    return any(get(url, path) is not None for path in ("/model_info", "/get_model_info"))


def complete(url: str, prompt: Prompt, request: dict[str, Any], new_tokens: int) -> Answer:
    """One streamed generation; `request` as for `client.complete`."""
    # Its `ignore_eos` ignores stop tokens too, so it stays off; its own seeds need a server in deterministic mode.
    sampling = {
        "temperature": request["temperature"],
        "max_new_tokens": new_tokens,
        "stop_token_ids": request["stop_token_ids"],
    }
    body = {"input_ids": prompt.ids, "sampling_params": sampling, "stream": True}
    started = time.perf_counter()
    first = last = 0.0
    tokens: list[int] | None = []
    text = ""
    told: dict[str, Any] = {}
    for event in events(url, "/generate", body):
        now = time.perf_counter() - started
        counted = event["meta_info"]["completion_tokens"]
        if counted > told.get("completion_tokens", 0):
            first, last = first or now, now
        told, text, new = event["meta_info"], event.get("text", ""), event.get("output_ids")
        # All tokens since the start, or, with the server's --incremental-streaming-output, the new ones.
        tokens = new if new is None or tokens is None or len(new) == counted else tokens + new
    histogram = next((told[name] for name in HISTOGRAM if told.get(name)), None)
    return Answer(
        prompt.name, tokens or None, text, told["completion_tokens"], first, last,
        accepted=None, forwards=told.get("spec_verify_ct"), histogram=histogram,
    )  # fmt: skip


def counters_of(answers: Sequence[Answer]) -> Counters | None:
    """Summed over requests; None where the server drafts nothing.

    Each forward after the prompt's gives its accepted drafts and a token more, so these are tokens - 1 - forwards:
    nothing beyond a generation's end counts. The histogram counts whole drafts.
    """
    if any(a.forwards is None and a.n_tokens > 1 for a in answers):
        return None
    forwards = sum(a.forwards or 0 for a in answers)
    generated = sum(a.n_tokens for a in answers)
    longest = max(len(a.histogram or ()) for a in answers)
    by_position = tuple(
        float(sum(sum((a.histogram or [])[i:]) for a in answers)) for i in range(1, longest)
    )  # accepted at position i - 1: forwards that accepted i drafts or more
    return Counters(generated, forwards, generated - len(answers) - forwards, by_position)
