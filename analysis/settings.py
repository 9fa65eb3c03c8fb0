"""What defines a run besides its data and seed: the settings of its config.yaml by which series are told apart.

The same settings name a point's folder (`Config.point_identity`; a test holds that the two agree). As columns of a
table they have the configuration's keys: `train.step_weight`, `optim.lr`.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

# Sections of a configuration and the keys of them that count; None: all but those of `NOT_OF_A_RUN`.
SECTIONS: dict[str, tuple[str, ...] | None] = {
    "target": ("model", "revision"),
    "corpus": None,
    "capture": ("compute_dtype", "layer_ids"),
    "store": ("dtype", "later_epochs"),
    "data": None,
    "draft": None,
    "train": None,
    "optim": None,
}
# The first row is the data axis; the rest does not change what is trained.
NOT_OF_A_RUN = {
    "data.scale", "corpus.sequences",
    "corpus.path", "corpus.validation_sequences", "draft.attention", "draft.recompute", "draft.compile",
    "train.log_every", "train.checkpoint_every", "train.keep_last", "train.keep_best", "train.eval_every",
    "train.max_hours", "train.nonfinite", "train.peak_tflops", "train.micro_batch_tokens", "train.padding",
}  # fmt: skip
UNUSED_BY = {
    "eagle1": ("init_lm_head", "init_layer"),
    "medusa": ("init_lm_head", "init_layer"),
    "mtp": ("init_lm_head",),
    "hf": ("init_lm_head", "init_layer", "vocab_size"),
    "prompt_lookup": ("init_lm_head", "init_layer", "vocab_size"),
}
# Options that came after the first points, and what those were trained with.
LATER: dict[str, Any] = {
    "data.base_tokens": None,
    "data.window": None,
    "draft.init_from": None,
    "train.objective": "soft_ce",
    "train.step_weights": None,
}
LATER_OF_EAGLE3: dict[str, Any] = {
    "draft.eagle3.hidden_size": None,
    "draft.eagle3.intermediate_size": None,
    "draft.eagle3.layers": 1,
    "draft.eagle3.lm_head": "trained",
    "draft.eagle3.norm_before_fc": False,
    "draft.eagle3.fc_norm": False,
    "draft.eagle3.norm_before_residual": False,
    "draft.eagle3.norm_output": False,
}
NONE = "none"  # null in a table: an empty cell says that the setting is not known


def settings(config: dict[str, Any]) -> dict[str, float | str]:
    """Config key -> value of a resolved configuration; what is no number is text. Data scale and seed are left out."""
    draft = config.get("draft") or {}
    kind = str(draft.get("kind"))
    unused = {f"draft.{name}" for name in UNUSED_BY.get(kind, ())}
    out: dict[str, Any] = {}
    for section, counted in SECTIONS.items():
        for name, value in (config.get(section) or {}).items():
            key = f"{section}.{name}"
            if key in NOT_OF_A_RUN | unused or (counted is not None and name not in counted):
                continue
            if section == "draft" and isinstance(value, dict):  # the options of a kind
                out |= {f"{key}.{option}": v for option, v in value.items() if name == kind}
            elif key == "corpus.sources":
                out[key] = [{k: v for k, v in source.items() if k != "path"} for source in value]
            else:
                out[key] = value
    if (config.get("store") or {}).get("mode") != "rolling" or out.get("store.later_epochs") != "fp8":
        out["store.later_epochs"] = "recapture"  # only fp8 copies differ from what is read of a whole store
    later = LATER | (LATER_OF_EAGLE3 if kind == "eagle3" else {})
    return {key: _cell(value) for key, value in (later | out).items()}


def _cell(value: Any) -> float | str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, int | float | str) else str(value)


def add_settings(runs: pd.DataFrame, configs: dict[int, dict[str, Any]]) -> pd.DataFrame:
    """`runs` with a column for every setting in which they differ; empty where a run's configuration is not there."""
    known = pd.DataFrame.from_dict({i: settings(c) for i, c in configs.items()}, orient="index").reindex(runs.index)
    differ = [c for c in known if known[c].map(text, na_action="ignore").nunique() > 1]
    return runs.drop(columns=[c for c in differ if c in runs]).join(known[differ])


def setting_columns(runs: pd.DataFrame) -> list[str]:
    """Those of a table that are settings."""
    return [c for c in map(str, runs.columns) if "." in c and c.partition(".")[0] in SECTIONS]


def text(value: Any) -> str:
    """A value for comparison and for people: 0.002 is 0.0020 and `0.002` read from a file."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    short = f"{number:g}"
    return short if float(short) == number else repr(number)
