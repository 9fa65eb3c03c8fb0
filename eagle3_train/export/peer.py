"""Run exported heads in the `speculators` library, whose interpreter may be another than ours (it wants an older
transformers): `python peer.py HEAD INPUTS OUTPUT [HEAD INPUTS OUTPUT ...]`. Imports nothing of this project.

INPUTS holds `hidden_states [1, T, n*H]`, `input_ids [1, T]` (x_{t+1} of each t) and `steps [1]`; OUTPUT gets
`logits [K, T, D]`, those of each training-time-test step.
"""

from __future__ import annotations

import sys


def run(head: str, inputs: str, output: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from speculators import SpeculatorModel
    from speculators.models.attention import create_float_mask

    model = SpeculatorModel.from_pretrained(head).float().eval()
    # Its fused attention has no CPU kernel; the explicit mask is the same function.
    model.config.transformer_layer_config._attn_implementation = "eager"
    model._attn_impl = "eager"
    model._create_mask_fn = create_float_mask
    given = load_file(inputs)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out[0]))
    with torch.no_grad():
        model(
            hidden_states=given["hidden_states"],
            input_ids=given["input_ids"],
            document_ids=torch.zeros_like(given["input_ids"]),
            ttt_steps=int(given["steps"]),
        )
    save_file({"logits": torch.stack(logits).contiguous()}, output)


if __name__ == "__main__":
    for i in range(1, len(sys.argv), 3):
        run(*sys.argv[i : i + 3])
