"""SpecForge 0.2.0's EAGLE-3 core: `OnlineEagle3Model` around its Llama draft, attention backend `sdpa`, a padded batch.

Its loss is a Triton kernel; on CPU the compiled reference beside it in the same module takes its place. As it ships
its data side computes the target's logits over the full vocabulary; `compact` takes its other teacher, which does not.
It drops rows whose most likely target token is not in the draft vocabulary, here five of six, from the loss and not
from the work.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from specforge.algorithms.eagle3 import model as core
from specforge.core import loss as losses
from specforge.modeling.draft import LlamaForCausalLMEagle3
from transformers import LlamaConfig
from workload import Tensors, Workload, adamw, llama_config


def make(work: Workload, tensors: Tensors, options: dict[str, Any]) -> tuple[Callable[[], float], dict[str, float]]:
    if work.device == "cpu":
        core.LogSoftmaxLoss = types.SimpleNamespace(apply=losses._compute_loss)
    d = work.sizes
    config = LlamaConfig(**llama_config(d), num_hidden_layers=1, draft_vocab_size=d.draft_vocab)
    torch.manual_seed(0)
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    ids = torch.from_numpy(work.draft_ids())
    with torch.no_grad():
        draft.t2d.zero_()
        draft.t2d[ids] = True
        draft.d2t.copy_(ids - torch.arange(len(ids)))
        draft.embed_tokens.weight.copy_(tensors.embed)
        draft.lm_head.weight.copy_(tensors.head[ids])
    draft.freeze_embedding()
    model = core.OnlineEagle3Model(draft, length=work.steps, attention_backend="sdpa").to(work.device)
    optimizer = adamw(model)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        """x_{t+1} in place of x_t, and nothing at the end."""
        return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1).to(work.device)

    inputs: dict[str, Any] = {
        "input_ids": shifted(tensors.input_ids),
        "attention_mask": torch.ones(tensors.input_ids.shape, device=work.device),
        "loss_mask": shifted(tensors.loss_mask)[..., None].float(),
        "hidden_states": tensors.features.to(work.device),
    }
    final = shifted(tensors.final)
    head = tensors.head.to(work.device)
    autocast = torch.autocast(work.device, work.torch_dtype, enabled=work.torch_dtype != torch.float32)

    def step() -> float:
        target: dict[str, Any] = {"target": final @ head.T}
        if options.get("compact"):
            target = {"target": None, "target_hidden_for_compact": final, "target_head_weight": head}
        with autocast:
            losses_by_step, *_ = model(**inputs, **target)
            loss = sum(0.8**i * x for i, x in enumerate(losses_by_step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step, {}
