"""Jobs: a step of the pipeline with its configuration, its folder, and the test of whether it is done.

A job is run by processes of its own and described by files alone, so that any process on any machine that sees the
folder can run it, wait for it, or tell how it stands:

    <folder>/config.yaml   the resolved configuration that all ranks read
    <folder>/status.json   state of the last attempt (launch/supervise.py)
    <folder>/log.txt       output of all attempts
    <folder>/.lock/        held while a process works on the job (launch/lock.py)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3_train.config import Config, digest
from eagle3_train.files import read_json, write_json

STEPS = ("prepare", "capture", "point")  # what a study runs, in this order
PARALLEL = ("capture", "point")  # steps that divide their work among several processes


@dataclass(frozen=True)
class Job:
    step: str  # one of STEPS
    cfg: Config

    @property
    def name(self) -> str:
        return self.cfg.point_name if self.step == "point" else self.step

    @property
    def folder(self) -> Path:
        return self.cfg.point_dir if self.step == "point" else Path(self.cfg.paths.study) / "steps" / self.step

    @property
    def processes(self) -> int:
        return self.cfg.launch.nproc_per_node if self.step in PARALLEL else 1

    def is_done(self) -> bool:
        """From files alone, and cheap: asked by a study before it starts any process."""
        return is_measured(self.cfg) if self.step == "point" else self._is_stamped()

    def stamp(self) -> None:
        """Record that a shared step has made what its configuration asks for. (A point has its result.json.)"""
        if self.step != "point":
            write_json(self.folder / "done.json", {"identity": data_identity(self.cfg, self.step)})

    def _is_stamped(self) -> bool:
        path = self.folder / "done.json"
        made = all(p.is_file() for p in outputs(self.cfg, self.step))
        return made and path.is_file() and read_json(path)["identity"] == data_identity(self.cfg, self.step)


def outputs(cfg: Config, step: str) -> list[Path]:
    """What a shared step leaves when it is complete: the file that each of its parts writes last."""
    if step == "prepare":
        return [Path(cfg.paths.corpus) / "report.json"]
    store = Path(cfg.paths.store)
    stores = [store, store / "validation", *(store / "transcripts" / task.name for task in cfg.eval.tasks)]
    return [s / "manifest.json" for s in stores]


def data_identity(cfg: Config, step: str = "capture") -> str:
    """Digest of all that shapes the data that the points of a study share."""
    parts: dict[str, Any] = {
        "target": asdict(cfg.target),
        "corpus": asdict(cfg.corpus),
        "tasks": [asdict(task) for task in cfg.eval.tasks],
    }
    if step != "prepare":
        parts |= {"capture": asdict(cfg.capture), "store": asdict(cfg.store)}
    return digest(parts, 16)


def is_measured(cfg: Config) -> bool:
    """Whether the point's result.json is whole and that of this configuration: trained, evaluated, and decoded where
    that is asked for. Otherwise the point is to be run; what it has already (the trained head) is not redone."""
    try:
        result = read_json(cfg.point_dir / "result.json")
    except (FileNotFoundError, ValueError):
        return False
    identities = result.get("train_identity"), result.get("eval_identity")
    if identities != (digest(cfg.point_identity), digest(cfg.eval_identity)):
        return False
    return not cfg.eval.decode or set(cfg.eval.decode_tasks) <= set(result.get("tau_decode", {}))
