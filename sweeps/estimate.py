"""What a study will take: sequences, tokens, disk, time. Figures that cannot be known yet are said to be unknown."""

from __future__ import annotations

from pathlib import Path

from eagle3_train.config import Config
from eagle3_train.console import duration
from eagle3_train.files import read_json
from launch import Job
from sweeps.points import Point, Study

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def describe(study: Study) -> str:
    """The plan in words: a line a point, then what the data takes."""
    cfg = study.cfg
    done = [Job("point", p.cfg).is_done() for p in study.points]
    lines = [f"study {cfg.study.name}: {len(study.points)} points, {sum(done)} done, in {study.dir}"]
    width = max(len(p.name) for p in study.points)
    for point, is_done in zip(study.points, done, strict=True):
        settings = " ".join(f"{k}={v}" for k, v in point.overrides.items())
        mark = "done" if is_done else "to do"
        decode = ", decoded too" if point.cfg.eval.decode and point.cfg.eval.decode_tasks else ""
        lines.append(
            f"  {point.name:<{width}}  {mark:<5}  {settings}  ({point.cfg.data.sequences} sequences, "
            f"{_length(point.cfg)}{decode})"
        )
    return "\n".join([*lines, _data(study)])


def _length(cfg: Config) -> str:
    return f"{cfg.train.steps} steps" if cfg.train.regime == "steps" else f"{cfg.train.epochs} epochs"


def _data(study: Study) -> str:
    cfg = study.cfg
    sequences = cfg.corpus.sequences or study.largest.cfg.data.sequences
    manifest = Path(cfg.paths.store) / "manifest.json"
    if manifest.is_file():
        tokens = read_json(manifest)["tokens"]
        return f"  data: captured, {tokens:,} tokens in {cfg.paths.store}"
    most = sequences * cfg.corpus.max_length
    text = f"  data: {sequences:,} sequences, at most {most:,} tokens"
    if (hidden := hidden_size(cfg)) is None:
        return f"{text}; disk is known once the target model is there (eagle3 prepare)"
    layers = 1 + len(cfg.capture.layer_ids or (0, 0, 0))  # the inputs of the draft head, and the final state
    return f"{text}, at most {most * layers * hidden * BYTES[cfg.store.dtype] / 2**30:.1f} GiB of hidden states"


def hidden_size(cfg: Config) -> int | None:
    """H of the target model, where its config.json is on this machine already."""
    for folder in (Path(cfg.paths.target), Path(cfg.target.model)):
        if (folder / "config.json").is_file():
            return int(read_json(folder / "config.json")["hidden_size"])
    return None


class TimeLeft:
    """Time of the points to come from that of the points that ran: a fixed part and one that grows with the work."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []  # work, seconds

    def add(self, point: Point, seconds: float) -> None:
        if seconds > 0:
            self._seen.append((work(point.cfg), seconds))

    def text(self, rest: list[Point]) -> str:
        if not rest or not self._seen:
            return ""
        return f", about {duration(self.seconds(rest))} for the other {len(rest)}"

    def seconds(self, rest: list[Point]) -> float:
        """Least squares of seconds = fixed + rate * work; proportional where all points seen had the same work."""
        n = len(self._seen)
        mean_work = sum(w for w, _ in self._seen) / n
        mean_seconds = sum(s for _, s in self._seen) / n
        spread = sum((w - mean_work) ** 2 for w, _ in self._seen)
        rate = sum((w - mean_work) * (s - mean_seconds) for w, s in self._seen) / spread if spread else 0.0
        if rate <= 0:
            return sum(mean_seconds * work(p.cfg) / mean_work for p in rest)
        fixed = max(0.0, mean_seconds - rate * mean_work)
        return sum(fixed + rate * work(p.cfg) for p in rest)


def work(cfg: Config) -> float:
    """Training work of a point in sequences, or in steps where these are fixed; K steps of the head each."""
    units = cfg.train.steps if cfg.train.regime == "steps" else cfg.data.sequences * cfg.train.epochs
    return float(units or 0) * cfg.draft.steps
