"""The model card of an exported head: what it is for, what it was trained on, how well it drafts, how to serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle3_train.export.layout import HeadSource
from eagle3_train.files import code_version

CARD = """\
---
library_name: {library}
tags: [speculative-decoding, {method}]
---
# {kind} draft head for {name}

A draft head for lossless speculative decoding of {target}. It has no use without that very model: it reads {states},
and speaks its tokens.

| | |
|---|---|
| format | {format}, {dtype} |
| parameters | {parameters:,} trained; width {hidden} |
| draft vocabulary | {draft_vocab:,} of the target's {vocab:,} tokens{coverage} |
| drafts | chains of {steps} tokens |
{training}| written by | eagle3-train {version} |

## Acceptance

{acceptance}

## Serve

vLLM; HEAD is this folder{where}:

```bash
vllm serve {served} --speculative-config '{{"method": "{method}", "model": "HEAD", "num_speculative_tokens": {steps}}}'
```
{sglang}
## Limits

- For {name} alone: another model, or a fine-tune of it, has other states, and drafts are then rarely accepted.
- Tokens outside the draft vocabulary cannot be drafted; the target still generates them, one a forward.
- Acceptance falls where text is unlike the training data, and with temperature. Output does not change, only speed.
- Drafting pays where a forward of several tokens costs little more than one of a single token: small batches, GPUs.
"""


SGLANG = """
SGLang reads `export.format=eagle` (not verified here; needs a GPU):

```bash
python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \\
  --speculative-draft-model-path HEAD --speculative-num-steps {steps} --speculative-eagle-topk 1 \\
  --speculative-num-draft-tokens {tokens}
```
"""
KINDS = {"eagle3": ("EAGLE-3", "eagle3"), "eagle1": ("EAGLE-1", "eagle"), "medusa": ("Medusa", "medusa")}  # vLLM's name


def model_card(source: HeadSource, format: str, dtype: torch.dtype, result: dict[str, Any]) -> str:
    """Markdown. `result`: what training and evaluation found, as far as they ran."""
    head = source.head
    coverage = result.get("vocab_coverage")
    kind, method = KINDS[head.kind]
    states, sglang = "its last hidden states", ""
    # A folder is of the machine that the head was trained on: it is named once, the commands have a word for it.
    is_folder = Path(source.target_name).is_absolute()
    served = "TARGET" if is_folder else source.target_name
    target = f"`{source.target_name}`"
    if source.converted_from:
        target = f"`{source.converted_from}` (converted to `{source.target_name}`)"
    if head.kind == "eagle3":
        states = f"the hidden states that enter its decoder layers {', '.join(map(str, source.layer_ids))}"
        sglang = SGLANG.format(target=served, steps=head.steps, tokens=head.steps + 1)
    return CARD.format(
        library="speculators" if format == "speculators" else "transformers",
        name=result.get("target", Path(source.target_name).name),
        target=target,
        served=served,
        where=", TARGET the folder of the target" if is_folder else "",
        kind=kind,
        method=method,
        states=states,
        sglang=sglang,
        format=format,
        dtype=str(dtype).removeprefix("torch."),
        parameters=head.parameter_counts()["trainable"],
        hidden=head.dims.hidden,
        draft_vocab=len(head.vocab.ids),
        vocab=source.vocab_size,
        coverage="" if coverage is None else f"; {coverage:.1%} of the supervised tokens",
        steps=head.steps,
        training=_training(result),
        version=code_version(),
        acceptance=_acceptance(result),
    )


def _training(result: dict[str, Any]) -> str:
    if "unique_tokens" not in result:
        return ""
    return (
        f"| data | {result['unique_sequences']:,} sequences, {result['unique_tokens']:,} tokens, of these "
        f"{result['supervised_tokens']:,} supervised; {result['consumed_tokens']:,} tokens seen in {result['steps']:,} "
        f"steps |\n| study | {result['study']}, point {result['point']} |\n"
    )


def _acceptance(result: dict[str, Any]) -> str:
    rows = result.get("evaluation")
    if not rows:
        return "Not measured."
    lines = [
        "tau: tokens a target forward, bonus token included; alpha_i: acceptance of draft i after i accepted ones.",
        "",
        "| task | temperature | method | draft | tau (95 %) | alpha | prompts |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        alpha = " ".join("-" if a is None else f"{a:.2f}" for a in row["alpha"])
        tau = "-" if row["tau"] is None else f"{row['tau']:.2f} ({row['tau_lo']:.2f}-{row['tau_hi']:.2f})"
        lines.append(
            f"| {row['task']} | {row['temperature']:g} | {row['method']} | {row['shape']} | {tau} | {alpha} | "
            f"{row['prompts']} |"
        )
    return "\n".join(lines)
