"""Clients of an OpenAI-compatible server: what they send, what comes back and when. Standard library alone."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 600.0  # of one read


@dataclass(frozen=True)
class Prompt:
    """`name`: its sample id. `ids`: tokens of the prompt."""

    name: str
    ids: list[int]


@dataclass(frozen=True)
class Answer:
    """What one request gave. Times in seconds from its being sent."""

    prompt: str
    tokens: list[int] | None  # generated; None where the server does not return ids
    text: str
    n_tokens: int
    first: float  # to the first token
    seconds: float  # to the last
    accepted: list[int] | None  # drafts accepted by each target forward after the prompt's; None: not told
    forwards: int | None = None  # after the prompt's, where that alone is told
    histogram: list[int] | None = None  # of these, by the drafts that they accepted


@dataclass(frozen=True)
class Load:
    """Answers of one run, in the order of the requests, and the wall time of all."""

    answers: list[Answer]
    seconds: float


Ask = Callable[[Prompt, dict[str, Any], int], Answer]  # a prompt, the request's settings, new tokens at most


def run_load(ask: Ask, prompts: Sequence[Prompt], concurrency: int, request: dict[str, Any], new_tokens: int) -> Load:
    """Send all prompts, `concurrency` of them at any time: a client sends its next one when its last is answered.

    The request's `seed` is the first one's; each has its own, so that a prompt that repeats is sampled anew.
    """
    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        requests = [request | {"seed": request["seed"] + i} for i in range(len(prompts))]
        answers = list(pool.map(lambda prompt, own: ask(prompt, own, new_tokens), prompts, requests))
    return Load(answers, time.perf_counter() - started)


def complete(url: str, model: str, prompt: Prompt, request: dict[str, Any], new_tokens: int) -> Answer:
    """One streamed completion."""
    body = request | {
        "model": model,
        "prompt": prompt.ids,
        "max_tokens": new_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # vLLM; others ignore it
    }
    started = time.perf_counter()
    first = last = 0.0
    tokens: list[int] | None = []
    text, counted, accepted = "", None, None
    for event in events(url, "/v1/completions", body):
        now = time.perf_counter() - started
        for choice in event.get("choices", []):
            new = choice.get("token_ids")
            if new or choice.get("text"):
                first, last = first or now, now
            text += choice.get("text") or ""
            tokens = None if tokens is None or new is None else tokens + new
        if usage := event.get("usage"):
            counted = usage["completion_tokens"]
        told = (event.get("metrics") or {}).get("speculative_decoding") or {}
        accepted = told.get("per_step_accepted", accepted)
    if counted is None:
        raise ValueError(f"{url} streams no usage: its answers cannot be counted")
    return Answer(prompt.name, tokens or None, text, counted, first, last, accepted)


def events(url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Server-sent events of a POST, as JSON. ValueError where the server refuses it."""
    with _connect(url) as connection:
        connection.request("POST", _path(url, path), json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"{url}{path} answers {response.status}: {response.read(2000).decode(errors='replace')}")
        for line in response:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(f"{url}{path}: {event['error']}")
                yield event


def get(url: str, path: str) -> bytes | None:
    """Body of a GET; None where nobody listens or the answer is not 200."""
    try:
        with _connect(url) as connection:
            connection.request("GET", _path(url, path))
            response = connection.getresponse()
            body = response.read()
            return body if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None


def served_model(url: str) -> str:
    """Name of the model that a server serves. ValueError where no server answers."""
    body = get(url, "/v1/models")
    if body is None:
        raise ValueError(f"no OpenAI-compatible server answers at {url}/v1/models: start it, or correct the URL")
    return json.loads(body)["data"][0]["id"]


def _connect(url: str) -> closing[http.client.HTTPConnection]:
    """To http(s)://HOST:PORT[/BASE]."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no URL of a server: write http://HOST:PORT")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return closing(kind(parts.netloc, timeout=TIMEOUT_S))


def _path(url: str, path: str) -> str:
    return urlsplit(url).path.rstrip("/") + path
