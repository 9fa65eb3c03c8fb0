"""speculators 0.9.0: its own model and losses, with the options that are closest to the EAGLE-3 paper: a Llama layer,
un-normed residual, KL divergence, decay 0.8, and its attention backend that runs on CPU (SDPA with a dense mask).

The documents of a batch are packed into one row, as its data loader packs them. Its Triton losses need a GPU; on CPU it
has the eager ones. It keeps `lm_head` frozen; `train_lm_head` trains it, as the paper does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig
from workload import Tensors, Workload, adamw, llama_config


def make(work: Workload, tensors: Tensors, options: dict[str, Any]) -> tuple[Callable[[], float], dict[str, float]]:
    d = work.sizes
    layer = LlamaConfig(**llama_config(d), num_hidden_layers=1)
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=d.draft_vocab,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[2, 15, 27],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=work.steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    torch.manual_seed(0)
    model = Eagle3DraftModel(config)
    ids = torch.from_numpy(work.draft_ids())
    t2d = torch.zeros(d.vocab, dtype=torch.bool)
    t2d[ids] = True
    model.load_vocab_mappings(t2d, ids - torch.arange(len(ids)))
    with torch.no_grad():
        model.embed_tokens.weight.copy_(tensors.embed)
        model.lm_head.weight.copy_(tensors.head[ids])
        model.verifier_lm_head.weight.copy_(tensors.head[ids])
    model.lm_head.weight.requires_grad_(bool(options.get("train_lm_head")))
    model = model.to(work.device)
    optimizer = adamw(model)

    # Its collator shifts the verifier's states and the mask by one: position t holds what x_{t+1}'s prediction needs.
    def packed(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)[None].to(work.device)

    length = work.length - 1
    inputs = {
        "hidden_states": packed(tensors.features[:, :-1]),
        "input_ids": packed(tensors.input_ids[:, 1:]),
        "document_ids": torch.arange(work.sequences, device=work.device).repeat_interleave(length)[None],
        "loss_mask": packed(tensors.loss_mask[:, 1:]),
        "position_ids": packed(torch.arange(1, length + 1).expand(work.sequences, -1)),
        "verifier_last_hidden_states": packed(tensors.final[:, 1:]),
    }
    arguments: dict[str, Any] = {
        "ttt_steps": work.steps,
        "ttt_step_loss_decay": 0.8,
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }
    autocast = torch.autocast(work.device, work.torch_dtype, enabled=work.torch_dtype != torch.float32)

    def step() -> float:
        with autocast:
            _, loss, metrics = model(**inputs, **arguments)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for value in metrics.values():  # its trainer logs them
            float(value.detach())
        return float(loss.detach())

    return step, {}
