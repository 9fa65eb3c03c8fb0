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

SHARED = ("prepare", "capture")  # the steps that the points of a study share, in order
DIVIDED = ("capture", "regenerate")  # steps whose work any number of jobs and processes share out
OF_STUDY = (*SHARED, "regenerate", "report")  # steps of the study as a whole; the others are steps of a point
TRAINS = ("train", "point")  # the steps that an engine runs


@dataclass(frozen=True)
class Job:
    """`part`: (i, n) for job i of n that divide the work of one step between them, each at its own time."""

    step: str
    cfg: Config
    part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.step in TRAINS and self.nodes * self.processes > 1 and self.cfg.engine.kind == "single":
            raise ValueError(
                f"engine=single is one process, but launch asks for {self.nodes} x {self.processes}: use engine=ddp"
            )

    @property
    def name(self) -> str:
        name = self.step if self.step in OF_STUDY else self.cfg.point_name
        return name if self.part is None else f"{name}-{self.part[0]}-of-{self.part[1]}"

    @property
    def folder(self) -> Path:
        return Path(self.cfg.paths.study) / "steps" / self.name if self.step in OF_STUDY else self.cfg.point_dir

    @property
    def nodes(self) -> int:
        return self.cfg.launch.nodes if self._divides else 1

    @property
    def processes(self) -> int:
        """Processes on each node."""
        return self.cfg.launch.nproc_per_node if self._divides else 1

    @property
    def _divides(self) -> bool:
        return self.part is None and self.step in (*DIVIDED, *TRAINS)

    def is_done(self) -> bool:
        """From files alone, and cheap: asked by a study before it starts any process. Other steps
        look for themselves at what they have done."""
        if self.step in SHARED:
            return self._is_stamped()
        return self.step == "point" and is_measured(self.cfg)

    def finish(self) -> bool:
        """After a successful run: record what a shared step has made. False: something that it should make is missing.
        Of several parts, the last to finish completes the whole."""
        if self.step in SHARED and all(p.is_file() for p in outputs(self.cfg, self.step)):
            write_json(self._stamp, {"identity": data_identity(self.cfg, self.step)})
        return self.is_done() or self.part is not None or self.step not in (*SHARED, "point")

    @property
    def _stamp(self) -> Path:
        return Path(self.cfg.paths.study) / "steps" / self.step / "done.json"

    def _is_stamped(self) -> bool:
        made = all(p.is_file() for p in outputs(self.cfg, self.step))
        try:
            stamp = read_json(self._stamp) if made and self._stamp.is_file() else {}
        except ValueError:  # damaged: the step looks for itself at what is there, and stamps anew
            return False
        return isinstance(stamp, dict) and stamp.get("identity") == data_identity(self.cfg, self.step)


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
    if not isinstance(result, dict):
        return False
    identities = result.get("train_identity"), result.get("eval_identity")
    if identities != (digest(cfg.point_identity), digest(cfg.eval_identity)):
        return False
    return not cfg.eval.decode or set(cfg.eval.decode_tasks) <= set(result.get("tau_decode", {}))
