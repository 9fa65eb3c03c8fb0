"""Jobs: a step of the pipeline with its configuration, its folder, and the test of whether it is done.

A job is run by processes of its own and described by files alone, so that any process on any machine that sees the
folder can run it, wait for it, or tell how it stands:

    <folder>/config.yaml   the resolved configuration that all ranks read
    <folder>/status.json   state of the last attempt (launch/supervise.py)
    <folder>/log.txt       output of all attempts
    <folder>/.lock/        held while a process works on the job (launch/lock.py)
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3_train.config import Config, digest, load
from eagle3_train.console import say
from eagle3_train.files import content_fingerprint, inside, is_file, read_json, write_json

SHARED = ("prepare", "capture")  # the steps that the points of a study share, in order
DIVIDED = ("capture", "regenerate", "roll")  # steps whose work any number of jobs and processes share out
# Steps of a study as a whole, all but the report once for each of its targets; the others are steps of a point.
OF_STUDY = (*SHARED, "regenerate", "roll", "report")
TRAINS = ("train", "point")  # the steps that an engine runs
NOT_OF_THE_DATA = ("mode", "cap_gib", "later_epochs", "silent_minutes")  # of `store`: when states are there, not which


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
        return self.whole if self.part is None else f"{self.whole}-{self.part[0]}-of-{self.part[1]}"

    @property
    def whole(self) -> str:
        """Name of the work of which this job is a part, or all."""
        if self.step not in OF_STUDY:
            return self.cfg.point_name
        session = self.cfg.launch.rolling.session if self.step == "roll" else ""
        which = session or (self.cfg.data_name if self.step != "report" else "")
        return f"{self.step}-{which}" if which else self.step

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
        """From files alone, and cheap: asked by a study before it starts any process. Other steps look for
        themselves at what they have done."""
        if self.step in SHARED:
            return all(map(is_file, outputs(self.cfg, self.step))) and self._is_as_stamped()
        return self.step == "point" and is_measured(self.cfg, self.folder)

    def has_changed(self) -> bool:
        """Of a shared step: whether it was done, and since then its settings or what it reads have changed. Where its
        results were removed, as they may be once all points are done, nothing has."""
        return bool(read_if_there(self._stamp)) and not self._is_as_stamped()

    def finish(self) -> bool:
        """After a successful run: record what a shared step has made. False: something that it should make is missing.
        Of several parts, the last to finish completes the whole."""
        if self.step in SHARED and all(map(is_file, outputs(self.cfg, self.step))):
            stamp = {"settings": data_identity(self.cfg, self.step), "inputs": inputs(self.cfg, self.step)}
            write_json(self._stamp, stamp)
        return self.is_done() or self.part is not None or self.step not in (*SHARED, "point")

    def forget(self) -> None:
        """Let a shared step look again at what it has made, whatever was recorded of it."""
        if self.step in SHARED:
            self._stamp.unlink(missing_ok=True)

    @property
    def _stamp(self) -> Path:
        return Path(self.cfg.paths.study) / "steps" / self.whole / "done.json"

    def _is_as_stamped(self) -> bool:
        """Whether the step was done with these settings, and what it read then is as it was, as far as it is here."""
        stamp = read_if_there(self._stamp)  # damaged: the step looks for itself at what is there, and stamps anew
        if stamp.get("settings") != data_identity(self.cfg, self.step):
            return False
        read = stamp.get("inputs", {})
        return all(now in (None, read.get(name)) for name, now in inputs(self.cfg, self.step).items())


def outputs(cfg: Config, step: str) -> list[str]:
    """What a shared step leaves when it is complete: the file that each of its parts writes last, or its URI."""
    if step == "prepare":
        return [inside(cfg.paths.corpus, "report.json")]
    others = ["validation", *(f"transcripts/{task.name}" for task in cfg.eval.tasks)]
    return [training_manifest(cfg), *(inside(cfg.paths.store, f"{part}/manifest.json") for part in others)]


def training_manifest(cfg: Config) -> str:
    """What says what the training store holds: its manifest, or while it rolls, what stands in for it."""
    whole = inside(cfg.paths.store, "manifest.json")
    return inside(cfg.paths.store, "rolling.json") if cfg.rolls and not is_file(whole) else whole


def data_identity(cfg: Config, step: str = "capture") -> str:
    """Digest of all settings that shape the data that the points of a study share."""
    target = {key: value for key, value in asdict(cfg.target).items() if key != "shape"}  # the model itself has it
    parts: dict[str, Any] = {
        "target": target,
        "corpus": asdict(cfg.corpus),
        "tasks": [asdict(task) for task in cfg.eval.tasks],
    }
    if step != "prepare":
        store = {key: value for key, value in asdict(cfg.store).items() if key not in NOT_OF_THE_DATA}
        parts |= {"capture": asdict(cfg.capture), "store": store}
    return digest(parts, 16)


def session_of(folder: Path) -> str:
    """The session of a rolling store in which the job of `folder` was last started; "" where it was in none."""
    path = folder / "config.yaml"
    return load(path).launch.rolling.session if path.is_file() else ""


def inputs(cfg: Config, step: str = "capture") -> dict[str, str | None]:
    """Fingerprints of what a shared step reads, so that another content under the same path shows. None: not here."""
    tasks = {f"eval.tasks.{task.name}": task.path for task in cfg.eval.tasks}
    sources = {f"corpus.sources.{source.name}": source.path for source in cfg.corpus.sources}
    paths = {"target.model": cfg.target.model, "target.chat_template": cfg.target.chat_template}
    paths |= {"corpus.path": cfg.corpus.path, **sources, **tasks}
    found = {name: content_fingerprint(path) for name, path in paths.items() if path}
    if step != "prepare":
        found["corpus"] = read_if_there(Path(cfg.paths.corpus) / "report.json").get("digest")
    return found


def is_measured(cfg: Config, folder: Path) -> bool:
    """Whether the result.json in a point's folder is whole and that of this configuration and of the stores as they are
    now: trained, evaluated, and decoded where that is asked for. Otherwise the point is to be run; what it has (the
    trained head) is not redone. Stores that are not there any more (a finished study needs none) are not compared."""
    result = read_if_there(folder / "result.json")
    identities = result.get("train_identity"), result.get("eval_identity")
    if identities != (digest(cfg.point_identity), digest(cfg.eval_identity)) or is_of_another_store(cfg, folder):
        return False
    replayed = result.get("transcripts", {})
    if any(_fingerprint(cfg, f"transcripts/{t.name}") not in (None, replayed.get(t.name)) for t in cfg.eval.tasks):
        return False
    if not (cfg.eval.decode and cfg.eval.decode_tasks):
        return True
    decoded = set(cfg.eval.decode_tasks) <= set(result.get("tau_decode", {}))
    return decoded and result.get("decode_identity") == digest(cfg.decode_identity)


def is_of_another_store(cfg: Config, folder: Path) -> bool:
    """Whether what a point's folder holds was trained on rows that are not those of the store now."""
    now = _fingerprint(cfg)
    states = [folder / "train.json", folder / "result.json", *sorted(folder.glob("checkpoints/step-*/state.json"))]
    found = [read_if_there(path) for path in states]
    plans = [plan if isinstance(plan := state.get("plan"), dict) else {} for state in found]
    trained = {s.get("store_fingerprint") or plan.get("fingerprint") for s, plan in zip(found, plans, strict=True)}
    return now is not None and bool(trained - {None, now})


def detach(cfg: Config) -> None:
    """Remove a point's link to another study's, where that is gone or was trained on other rows than are here now."""
    link = cfg.point_dir
    if link.is_symlink() and (not link.exists() or is_of_another_store(cfg, link)):
        link.unlink(missing_ok=True)


def set_aside(cfg: Config, folder: Path) -> None:
    """Move what was trained on another store than the present one into a folder of its own, so that the point is
    trained anew. Only while the point's lock is held."""
    aside = folder / f"of-another-store-{time.strftime('%Y%m%d-%H%M%S')}"
    aside.mkdir()
    for name in ("checkpoints", "train.json", "records.jsonl", "result.json", "metrics.jsonl"):
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    say(f"{folder.name}: it was trained on another store than {cfg.paths.store} holds now: kept in {aside}, and anew")


def _fingerprint(cfg: Config, part: str = "") -> str | None:
    """Of the training store, or of one inside it, by its manifest; None where there is none."""
    path = inside(cfg.paths.store, f"{part}/manifest.json") if part else training_manifest(cfg)
    return read_if_there(path).get("fingerprint")


def read_if_there(path: str | Path) -> dict[str, Any]:
    """A JSON file, local or at a URI; empty where it is missing or damaged: whoever wrote it looks at it again."""
    try:
        value = read_json(path)
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
