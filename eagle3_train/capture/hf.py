"""Hidden states of a target in transformers, by hooks: only the asked layers are ever kept."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from eagle3_train.config import Config
from eagle3_train.corpus import Row
from eagle3_train.device import DTYPES
from eagle3_train.store import Sequence
from eagle3_train.target import load_target

from .backend import Progress, probe, stop_tokens
from .batches import by_length, windows
from .ends import decoder_of, input_device
from .generate import Prompt, Sampling, generate, transcript
from .next_token import NextToken, columns, wanted
from .plan import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HiddenStates:
    """Context manager over a target with hooks on it. Calling it runs a batch of rows.

    Layer id k is the residual stream entering decoder layer k; id n_layers is what the final norm is given, that is the
    pre-norm output of the last layer (transformers' own `hidden_states[n_layers]` is behind the norm).
    """

    def __init__(self, model: PreTrainedModel, layer_ids: tuple[int, ...], dtype: torch.dtype, logsumexp: bool) -> None:
        self.layer_ids, self.dtype = layer_ids, dtype
        self.decoder = decoder_of(model)
        self.next_token = NextToken(model, logsumexp)
        self.device = input_device(model)
        self._seen: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> HiddenStates:
        layers = self.decoder.layers
        for k in self.layer_ids:
            module = self.decoder.norm if k == len(layers) else layers[k]
            self._hooks.append(module.register_forward_pre_hook(self._keep(k), with_kwargs=True))
        return self

    def _keep(self, k: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen[k] = args[0] if args else kwargs["hidden_states"]

        return hook

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._seen.clear()

    @torch.inference_mode()
    def __call__(self, rows: list[Row]) -> list[Sequence]:
        """Sequences of `rows`, in the same order; hidden states [T, len(layer_ids), H] on the CPU."""
        lengths = [len(r.input_ids) for r in rows]
        # Padding stands on the right, where causal attention never looks from a real token: no mask is needed, and
        # without one SDPA takes its fused causal kernel. What comes out at the padding is not read.
        ids_BT = pad_sequence([torch.from_numpy(r.input_ids.astype(np.int64)) for r in rows], batch_first=True)
        normed_BTH = self.decoder(input_ids=ids_BT.to(self.device), use_cache=False).last_hidden_state
        hidden_BTLH = _to_host([self._seen[k].to(self.dtype) for k in self.layer_ids])
        self._seen.clear()
        masks = [wanted(r.loss_mask) for r in rows]
        asked = [
            normed_BTH[b, :n][torch.from_numpy(m).to(normed_BTH.device)]
            for b, (n, m) in enumerate(zip(lengths, masks, strict=True))
        ]
        argmax, logsumexp = self.next_token(torch.cat(asked))
        ends = np.cumsum([int(m.sum()) for m in masks])[:-1]
        parts = zip(
            np.split(argmax, ends),
            np.split(logsumexp, ends) if logsumexp is not None else [None] * len(rows),
            strict=True,
        )
        return [
            Sequence(r.sample_id, r.source, r.input_ids, r.loss_mask, hidden_BTLH[b, :n], **columns(r.loss_mask, *part))
            for b, (r, n, part) in enumerate(zip(rows, lengths, parts, strict=True))
        ]


def _to_host(states_BTH: list[torch.Tensor]) -> torch.Tensor:
    """[B, T, layers, H] on the CPU; from one GPU in one copy, to memory that it writes by itself."""
    if len({s.device for s in states_BTH}) > 1 or not states_BTH[0].is_cuda:  # a device map spreads the layers
        return torch.stack([s.cpu() for s in states_BTH], 2)
    states_BTLH = torch.stack(states_BTH, 2)
    return torch.empty(states_BTLH.shape, dtype=states_BTLH.dtype, pin_memory=True).copy_(states_BTLH)


class HfBackend:
    """The target in transformers: on one device, or spread over several, memory and disk by accelerate."""

    def __init__(self, cfg: Config, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.cfg = cfg
        self.dtype = dtype
        memory: dict[int | str, str] = {int(k) if k.isdigit() else k: v for k, v in cfg.capture.max_memory.items()}
        self._offload = tempfile.TemporaryDirectory()  # of weights that are in no safetensors file
        self.model = load_target(
            folder,
            dtype,
            device,
            cfg.target.trust_remote_code,
            cfg.capture.device_map,
            memory or None,
            self._offload.name,
        )
        self.stops = stop_tokens(cfg.target, folder)

    def __enter__(self) -> HfBackend:
        return self

    def __exit__(self, *_: object) -> None:
        del self.model
        self._offload.cleanup()

    @torch.inference_mode()
    def rate(self) -> float:
        vocabulary = self.model.config.get_text_config().vocab_size
        decoder, device = self.model.get_decoder(), input_device(self.model)

        def run(sequences: int, length: int) -> None:
            ids = torch.randint(0, vocabulary, (sequences, length)).to(device)
            decoder(input_ids=ids, use_cache=False).last_hidden_state.sum().item()

        return probe(run, self.cfg.corpus.max_length, self.cfg.capture.batch_tokens)

    def generate(self, prompts: list[Prompt], sampling: Sampling, progress: Progress) -> list[list[int]]:
        return [new.tolist() for new in generate(self.model, prompts, self.stops, sampling, progress)]

    def sequences(self, job: Job, rows: list[Row], progress: Progress) -> Iterator[Sequence]:
        """Computed in batches of like lengths within a window of rows."""
        if job.task is not None:
            prompts = [Prompt(r.sample_id, r.input_ids, job.task.new_tokens) for r in rows]
            new = self.generate(prompts, Sampling.of_task(job.task, self.cfg.corpus.seed), progress)
            rows = [transcript(r, np.asarray(n)) for r, n in zip(rows, new, strict=True)]
        lengths = [len(r.input_ids) for r in rows]
        dtype = DTYPES.get(job.spec.dtype, self.dtype)  # fp8 is made by the writer, with its scales
        with HiddenStates(self.model, job.spec.layer_ids, dtype, job.spec.logsumexp) as states:
            for window in windows(lengths, self.cfg.capture.batch_tokens):
                found: dict[int, Sequence] = {}
                for batch in by_length([lengths[i] for i in window], self.cfg.capture.batch_tokens):
                    numbers = [window[i] for i in batch]
                    found |= dict(zip(numbers, states([rows[i] for i in numbers]), strict=True))
                    progress(sum(lengths[i] for i in numbers))
                yield from (found[i] for i in window)
