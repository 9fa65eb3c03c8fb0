"""The plan of a study in words, and the time that is left while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3_train.config import Config
from eagle3_train.console import count, duration, size
from eagle3_train.files import inside, is_file, read_json, read_object
from launch import Job
from sweeps import cost
from sweeps.points import Part, Point, Study


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
            f"  {point.name:<{width}}  {mark:<5}  {settings}  ({point.cfg.data}, {_length(point.cfg)}{decode})"
        )
    decoded = sum(p.cfg.eval.decode and bool(p.cfg.eval.decode_tasks) for p in study.points)
    for item in study.unmatched:
        consequence = f" (decoded: {decoded} of {len(study.points)})" if item.startswith("study.decode_points") else ""
        lines.append(f"  {item} matches no point{consequence}")
    if cfg.eval.decode and cfg.eval.decode_tasks and not decoded:
        lines.append("  no point is decoded with the real target: study.decode_points=[] decodes all")
    several = len(study.parts) > 1
    left = {p.name for p, is_done in zip(study.points, done, strict=True) if not is_done}
    found = [Needs.of(part, [p.cfg for p in part.points if p.name in left]) for part in study.parts]
    for part, needs in zip(study.parts, found, strict=True):
        own = [f"  {missing}"] if (missing := missing_data(part.largest.cfg)) else []
        own += needs.lines
        lines += [f"  {part.cfg.target.name}:", *(f"  {line}" for line in own)] if several else own
    return "\n".join([*lines, *([_total(found)] if several else [])])


def missing_data(largest: Config) -> str:
    """Why the store that is there is not the one that `largest` reads, the largest point of those that share it, and
    the ways out; "" where it is, or nothing is captured yet."""
    store = largest.paths.store
    if changed := cost.captured_otherwise(largest):
        why = f"the store {store} was captured with {'; '.join(changed.values())}"
        return f"{why}. {_anew(largest, cost.data_of(largest), 'restore that, or go on with')}"
    if not is_file(inside(store, "manifest.json")):
        return ""
    held = cost.data_of(largest)
    needed = held.of(largest)
    if needed.sequences <= held.sequences:
        return ""
    why = f"{largest.data.scale:g}x needs {largest.data}, the store {store} holds {held.sequences}"
    how = f"take {cost.SEQUENCES}={needed.sequences} and"
    return f"{why}. {_anew(largest, replace(needed, exact=False, assumed='as those that are there'), how)}"


def _anew(cfg: Config, data: cost.Data, how: str) -> str:
    """What another store than the one that is there takes: all of it."""
    shape = cost.shape_of(cfg)
    disk = f", {size(cost.store_bytes(cfg, shape, data))}" if shape else ""
    return (
        f"A store does not grow: all {data.sequences:,} sequences ({data.sure}{data.tokens:,.0f} tokens{disk}) are to "
        "be captured anew, and all points to be trained anew, since the draft vocabulary and the order of the data are "
        f"those of the whole store (docs/study.md). The ways: {how} another study.name (or paths.store), which leaves "
        f"what is finished as it is; or remove this store first: rm -r {cfg.paths.store}"
    )


def _length(cfg: Config) -> str:
    epochs = f"{cfg.train.epochs} epoch" + "s" * (cfg.train.epochs > 1)
    return {"steps": f"{cfg.train.steps} steps", "epochs": epochs, "none": "not trained"}[cfg.train.regime]


@dataclass(frozen=True)
class Needs:
    """What the points of one target take, as far as it is known; time and FLOPs are those of what is left to do.
    `lines`: in words. All but `data` are None where the target's shape is not known; times in seconds, where a speed is
    known."""

    lines: list[str]
    data: cost.Data
    store: float | None = None  # bytes of hidden states
    beside: float | None = None  # bytes of the rest of the store, at most
    checkpoints: float | None = None  # bytes
    capture: float | None = None  # FLOPs
    training: float | None = None  # FLOPs
    capture_s: float | None = None  # on one device
    training_s: float | None = None

    @classmethod
    def of(cls, part: Part, left: list[Config]) -> Needs:
        """`left`: the points that are not done."""
        cfg, points = part.cfg, [p.cfg for p in part.points]
        data, shape = cost.data_of(part.largest.cfg), cost.shape_of(cfg)
        sure = data.sure
        text = f"  data: {data.sequences:,} sequences, {sure}{data.tokens:,.0f} tokens"
        if data.exact or data.assumed:
            text += f", {sure}{data.supervised:,.0f} of them supervised"
        if data.assumed:
            text += f" (assumed: {data.assumed})"
        if shape is None:
            return cls([f"{text}; disk and FLOPs are known once the target model is there (eagle3 prepare)"], data)
        flops = sum(cost.training_flops(p, shape, data.of(p)) for p in left)
        speed = Speed.of(cfg, (p.dir for p in part.points))
        tokens = cost.captured_tokens(left, data, cfg.store.later_epochs) if cfg.rolls else data.tokens
        if is_captured := is_file(inside(cfg.paths.store, "manifest.json")) and data.exact:
            tokens = 0.0
        capture, tflops = cost.capture_flops(shape, tokens), cfg.plan.capture_tflops
        store, checkpoints = cost.store_bytes(cfg, shape, data), cost.checkpoint_bytes(points, shape)
        rest = cost.beside_bytes(cfg, shape, data)
        beside, parts = sum(rest.values()), ", ".join(f"{size(n)} {what}" for what, n in rest.items())
        capture_s = capture / tflops / 1e12 if tflops else None
        lines = [
            text,
            f"  disk: {sure}{size(store)} of hidden states, at most {size(beside)} beside them in the store ({parts}), "
            f"at most {size(checkpoints)} of checkpoints",
            *(_rolling(cfg, left, shape, data) if cfg.rolls else ()),
            "  compute: "
            + ("captured already" if is_captured else f"{sure}{capture:.2g} FLOPs to capture")
            + (f" ({capture_s / 3600:,.0f} device-hours at plan.capture_tflops={tflops:g})" if capture_s else "")
            + f", {_training(flops, len(left), len(points), sure)}{speed.text(flops) if speed and left else ''}",
        ]
        if tflops:
            rate = tflops * 1e12 / cost.capture_flops(shape, 1)
            lines.append(
                f"  a device captures {rate:,.0f} tokens/s, and writes {size(rate * cost.token_bytes(cfg, shape))}/s"
            )
        if speed and flops:
            lines += _traffic(part.largest.cfg, shape, data, speed)
        training_s = flops / speed.flops_per_s if speed else None
        return cls(lines, data, store, beside, checkpoints, capture, flops, capture_s, training_s)


def _training(flops: float, left: int, points: int, sure: str) -> str:
    """FLOPs of the `left` ones of all points, in words."""
    if not left:
        return "all points are done"
    which = "all points" if left == points else f"the {count(left, 'point')} that {'is' if left == 1 else 'are'} left"
    return f"{sure}{flops:.2g} FLOPs to train {which}"


def _total(found: Sequence[Needs]) -> str:
    """Of all targets of a study: what is known of each of them."""
    known = [needs.data for needs in found]
    sure = "" if all(d.exact for d in known) else "about " if any(d.assumed for d in known) else "at most "
    parts = [f"  in total: {sure}{sum(data.tokens for data in known):,.0f} tokens"]
    for name, show, words in (
        ("store", size, "of hidden states"),
        ("beside", size, "beside them in the stores at most"),
        ("checkpoints", size, "of checkpoints at most"),
        ("capture", "{:.2g}".format, "FLOPs to capture"),
        ("capture_s", duration, "of one device for that"),
        ("training", "{:.2g}".format, "FLOPs to train what is left"),
        ("training_s", duration, "for that"),
    ):
        values = [getattr(needs, name) for needs in found]
        if None not in values:
            parts.append(f"{show(sum(values))} {words}")
    return ", ".join(parts)


def _traffic(cfg: Config, shape: cost.Shape, data: cost.Data, speed: Speed) -> list[str]:
    """What training needs of a node's disk, network and memory, at its speed: the largest point."""
    data = data.of(cfg)
    processes = cfg.launch.nodes * cfg.launch.nproc_per_node
    tokens_per_s = cost.epochs(cfg, data) * data.tokens / (cost.training_flops(cfg, shape, data) / speed.flops_per_s)
    read = tokens_per_s / cfg.launch.nodes * cost.token_bytes(cfg, shape)
    where = f"{processes} processes" if processes > 1 else "one process"
    text = f"  {cfg.data.scale:g}x trains {tokens_per_s:,.0f} tokens/s on {where}: a node reads {size(read)}/s"
    if cfg.launch.nodes > 1:
        step = cost.exchanged_bytes(cfg, shape)
        text += f", and exchanges {size(step)} a step, {size(step * tokens_per_s / cfg.train.batch_tokens)}/s"
    memory, index = sum(cost.training_bytes(cfg, shape).values()), cost.INDEX_BYTES * data.sequences
    return [text, f"  memory of a process: about {size(memory)} of tensors, {size(index)} of the store's index"]


def _rolling(cfg: Config, points: list[Config], shape: cost.Shape, data: cost.Data) -> list[str]:
    """What a rolling store takes for `points`, with either way to feed later epochs."""
    copies = cost.store_bytes(cfg, shape, data, "fp8")
    at_once = cfg.launch.rolling.points_at_once
    sharing = f"up to {at_once} points share their passes" if at_once > 1 else "each point has passes of its own"
    lines = [
        f"  rolling: at most {cfg.store.cap_gib:g} GiB of the hidden states at a time; windows of "
        f"{cfg.data.window or 'all'} sequences; {sharing}"
    ]
    # The exact least cap is known with the lengths of the sequences (capture.passes); below this none will do.
    least = cost.store_bytes(cfg, shape, data.first(min(2 * (cfg.data.window or data.sequences), data.sequences)))
    if (cfg.store.cap_gib or 0) * 2**30 < least:
        lines.append(
            f"    store.cap_gib={cfg.store.cap_gib:g} will be refused, as far as can be told yet: two windows of a "
            f"point take {data.sure}{size(least)}; raise it, or lower data.window"
        )
    for choice, room in (("recapture", "nothing"), ("fp8", f"{size(copies)} of copies")):
        tokens = cost.captured_tokens(points, data, choice)
        mark = " (chosen)" if choice == cfg.store.later_epochs else ""
        lines.append(
            f"    store.later_epochs={choice}{mark}: {tokens:,.0f} tokens captured, "
            f"{cost.capture_flops(shape, tokens):.2g} FLOPs; keeps {room} within the cap for later epochs"
        )
    return lines


def describe_point(cfg: Config, parameters: Mapping[str, int] | None, counted: cost.Data | None) -> str:
    """One point before it is trained: steps, tokens, FLOPs, memory and time, as far as known.

    Args:
        parameters: of its head by part, where the store that it is built from is there.
        counted: its own rows of that store; None where they are not all there.
    """
    data, shape = counted or cost.data_of(cfg).of(cfg), cost.shape_of(cfg)
    about = "" if counted else data.sure or "about "
    steps, consumed = cost.optimizer_steps(cfg, data), cost.epochs(cfg, data) * data.tokens
    lines = [
        f"point {cfg.point_name}, in {cfg.point_dir}{_standing(cfg)}",
        f"  data: {data.sequences:,} sequences, {about}{data.tokens:,.0f} tokens, {_length(cfg)}",
        f"  steps: {about}{steps:,} of {cfg.train.batch_tokens:,} tokens, {about}{consumed:,.0f} tokens in all",
    ]
    if parameters is not None:
        lines.append("  parameters: " + ", ".join(f"{part} {count:,}" for part, count in parameters.items()))
    if shape is None:
        return "\n".join([*lines, "  the rest is known once the target model is there (eagle3 prepare)"])
    flops, memory = cost.training_flops(cfg, shape, data), cost.training_bytes(cfg, shape)
    parts = ", ".join(f"{size(n)} {what}" for what, n in memory.items())
    speed = Speed.of(cfg, sorted(path.parent for path in Path(cfg.paths.study).glob("*/train.json")))
    return "\n".join(
        [
            *lines,
            f"  memory: about {size(sum(memory.values()))} of tensors a process ({parts}); checkpoints "
            f"{size(cost.checkpoint_bytes([cfg], shape))}",
            f"  compute: {about}{flops:.2g} FLOPs{speed.text(flops) if speed else ''}",
        ]
    )


def _standing(cfg: Config) -> str:
    done = {"trained": "train.json", "evaluated": "result.json"}
    words = " and ".join(word for word, name in done.items() if (cfg.point_dir / name).is_file())
    return f": {words} already" if words else ""


@dataclass(frozen=True)
class Speed:
    """Of all processes of a point together; `where`: that is known from."""

    flops_per_s: float
    processes: int
    where: str

    @classmethod
    def of(cls, cfg: Config, points: Iterable[Path]) -> Speed | None:
        """As these points had it, or as `launch.tflops` says; None where neither is known."""
        launch = cfg.launch
        processes = launch.nodes * launch.nproc_per_node
        found = [read_json(p / "train.json") for p in points if (p / "train.json").is_file()]
        if done := [d for d in found if d["train_flops"]]:
            rate = sum(d["train_flops"] for d in done) / sum(d["wall_seconds"]["train"] for d in done)
            return cls(rate, processes, f"the {rate / 1e12:.2g} TFLOP/s of the points that are trained")
        if launch.tflops:
            rate = launch.tflops * 1e12 * processes
            return cls(rate, processes, f"launch.tflops={launch.tflops:g} a process")
        return None

    def text(self, flops: float) -> str:
        """Time of `flops`."""
        seconds = flops / self.flops_per_s
        many = f" ({seconds * self.processes / 3600:,.0f} device-hours)" if self.processes > 1 else ""
        return f", {duration(seconds)}{many} at {self.where}"


class TimeLeft:
    """Time of the points to come from that of the points that ran: training grows with the work, decoding takes the
    same for each point that is decoded, and the rest (start, replay) the same for all."""

    def __init__(self) -> None:
        self._work = self._training = 0.0
        self._decoding: list[float] = []
        self._rest: list[float] = []

    def add(self, point: Point, seconds: float) -> None:
        """A point that took `seconds`; its result.json says on what. One that failed says nothing."""
        path = point.dir / "result.json"
        if seconds <= 0 or not path.is_file():
            return
        wall = read_object(path).get("wall_seconds", {})
        training, decoding = wall.get("train", 0.0), wall.get("decode", 0.0)
        self._work += work(point.cfg)
        self._training += training
        if decoding:
            self._decoding.append(decoding)
        self._rest.append(max(0.0, seconds - training - decoding))

    def text(self, rest: list[Point]) -> str:
        if not rest or not self._rest:
            return ""
        return f", about {duration(self.seconds(rest))} for the other {len(rest)}"

    def seconds(self, rest: list[Point]) -> float:
        fixed = len(rest) * sum(self._rest) / len(self._rest)
        training = self._training * sum(work(p.cfg) for p in rest) / self._work if self._work else 0.0
        decoded = sum(p.cfg.eval.decode and bool(p.cfg.eval.decode_tasks) for p in rest)
        return fixed + training + (decoded * sum(self._decoding) / len(self._decoding) if self._decoding else 0.0)


def work(cfg: Config) -> float:
    """Training work of a point: multiples of the data at 1x, or steps where these are fixed; K of the head each."""
    units = cfg.train.steps if cfg.train.regime != "epochs" else cfg.data.scale * cfg.train.epochs
    return float(units or 0) * cfg.draft.steps
