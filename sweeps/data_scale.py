"""A study as a Hydra multirun: `python -m sweeps.data_scale -m data.scale=1,2,4,8 seed=0,1`.

Each job prepares and captures if need be and runs one point, in the folders and under the names of `eagle3 study`.
Points that are done are passed over, so the two may be mixed. A failing point does not stop the others. With
`launch=slurm` the points are submitted, as a study of these axes is.
"""

from __future__ import annotations

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from eagle3_train import config
from eagle3_train.cli import guarded
from eagle3_train.console import duration, say
from launch import Job, Outcome, run
from sweeps.estimate import missing_data
from sweeps.points import compositions, set_decode, split
from sweeps.study import run_study, share_data

_failed: dict[str, Outcome] = {}  # Hydra returns nothing from a multirun


@hydra.main(config_path=str(config.conf_dir()), config_name="config", version_base="1.3")
def run_one(composed: DictConfig) -> None:
    """Run the point that Hydra composed."""
    cfg = config.resolve(composed)
    set_decode(cfg, dict(text.partition("=")[::2] for text in HydraConfig.get().overrides.task))
    point = Job("point", cfg)
    if cfg.dry_run or point.is_done():
        say(f"{point.name}: {'done already' if point.is_done() else 'to do'}")
        return
    share_data(cfg)
    outcome = run(point)
    if outcome.state == "done":
        say(f"{point.name}: done in {duration(outcome.seconds)}")
    else:
        _failed[point.name] = outcome


def main() -> int:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach `guarded`, which prints them as `eagle3` does
    words = [word for word in sys.argv[1:] if "=" in word and word[0] != "-" and not word.startswith("hydra")]
    fixed, swept = split(words)
    if config.compose([*fixed.values()]).launch.kind == "slurm":
        run_study([*words, "study.axes={}"])
        return 0
    of_target = {key: values for key, values in swept.items() if config.is_of_target(key)}
    for key, values in of_target.items():  # each job sees one value, and is to know that there are others
        sys.argv.append(f"++study.axes={{{key}:[{','.join(values)}]}}")
    raw = config.compose_raw([*fixed.values()])
    OmegaConf.update(raw, "study.axes", of_target, merge=False)
    for _, cfg in compositions([*fixed.values()], raw, swept):  # all of them, before the first job does anything
        if missing := missing_data(cfg):
            raise ValueError(missing)
    run_one()
    for name, outcome in _failed.items():
        say(outcome.text(name))
    return 1 if _failed else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
