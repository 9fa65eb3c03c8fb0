"""Stand-ins for the rooms that do the work, so that the study's own behaviour is tested in seconds.

Python imports this file by itself at start when its folder is on PYTHONPATH. The command line, the launcher and the
study are the real ones.

Every call is noted in $FAKE_CALLS, a line each. $FAKE_FAIL: a part of the names of points whose training fails.
$FAKE_FAIL_RANK: that rank's does. $FAKE_ROLL_FAIL: workers fail. $FAKE_SECONDS: how long a training takes. $FAKE_LR:
the learning rate of the lowest validation loss, at each data scale.
"""

import json
import math
import os
import signal
import sys
import time
import types
from pathlib import Path

from eagle3_train.config import digest
from eagle3_train.files import content_fingerprint, read_json, write_json, write_text


def note(text):
    with open(os.environ["FAKE_CALLS"], "a") as f:
        f.write(f"{text} pid={os.getpid()}\n")


def prepare(cfg, captured):
    note("prepare")
    part = {"sequences": 256, "tokens": 1000, "supervised_tokens": 500}
    report = {"parts": {"train": part}, "digest": content_fingerprint(cfg.corpus.path)}
    write_json(Path(cfg.paths.corpus) / "report.json", report)


def capture(cfg, rank=0, world=1):
    note(f"capture {rank}/{world}")
    store = Path(cfg.paths.store)
    rows = read_json(Path(cfg.paths.corpus) / "report.json")["digest"]
    for folder in (store, store / "validation", *(store / "transcripts" / t.name for t in cfg.eval.tasks)):
        write_json(
            folder / "manifest.json", {"fingerprint": rows, "rows": 256, "tokens": 1000, "supervised_tokens": 500}
        )


def share_passes(cfg, readings):
    names, size = list(readings), cfg.launch.rolling.points_at_once
    return [names[i : i + size] for i in range(0, len(names), size)]


def roll(cfg, rank=0, world=1):
    """Until every run that is expected has been trained."""
    note(f"roll {rank}/{world}")
    if "FAKE_ROLL_FAIL" in os.environ:
        raise ValueError("the store is being captured")
    if (part := os.environ.get("FAKE_ROLL_DIES")) and rank == 0:
        os.environ.pop("FAKE_ROLL_DIES")
        if not Path(part).exists():
            Path(part).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    expected = list(read_json(cfg.session_file))
    while not all(cfg.given_up_file(name).exists() or calls(f"trained {name}") for name in expected):
        time.sleep(0.05)
    note(f"rolled {rank}/{world}")


def calls(word):
    lines = Path(os.environ["FAKE_CALLS"]).read_text().splitlines()
    return [line for line in lines if line.startswith(f"{word} ")]


def train(cfg, evaluate=None, is_lost=None):
    note(f"train {cfg.point_name}")
    if os.environ.get("FAKE_FAIL_RANK") == os.environ.get("RANK", "0"):
        raise ValueError("the store is damaged")
    steps = 10
    metrics = cfg.point_dir / "metrics.jsonl"
    metrics.parent.mkdir(parents=True, exist_ok=True)
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    for step in range(done + 1, steps + 1):
        time.sleep(float(os.environ.get("FAKE_SECONDS", "0")) / steps)
        with open(metrics, "a") as f:
            f.write(json.dumps({"step": step, "time": time.time(), "steps": steps, "tokens_per_s": 100.0}) + "\n")
        print(f"step {step} of {steps}")
    if (part := os.environ.get("FAKE_FAIL")) and part in cfg.point_name:
        raise RuntimeError("the loss is not finite")
    trained = {"train_flops": 1e12, "wall_seconds": {"train": 1.0}, "store_fingerprint": fingerprint(cfg)}
    if best := json.loads(os.environ.get("FAKE_LR", "{}")):
        trained["val_loss"] = 1 + abs(math.log10(cfg.optim.lr / best[f"{cfg.data.scale:g}"]))
    write_json(cfg.point_dir / "train.json", trained)
    note(f"trained {cfg.point_name}")
    return "head"


def fingerprint(cfg):
    return read_json(Path(cfg.paths.store) / "manifest.json")["fingerprint"]


def measure(cfg, head, target_model):
    assert head == "head"
    result = {"train_identity": digest(cfg.point_identity), "eval_identity": digest(cfg.eval_identity)}
    result |= {"store_fingerprint": fingerprint(cfg), "transcripts": {t.name: fingerprint(cfg) for t in cfg.eval.tasks}}
    if cfg.eval.decode:
        assert target_model == "target"
        result["decode_identity"] = digest(cfg.decode_identity)
        result["tau_decode"] = {name: {} for name in cfg.eval.decode_tasks}
    write_json(cfg.point_dir / "result.json", result)


def write_report(analysis, out):
    note("report")
    write_text(out / "report.html", "report")
    return out / "report.html"


def module(name, **members):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


module("eagle3_train.corpus", prepare=prepare)
module("eagle3_train.target", prepare_target=lambda cfg, folder: folder, load_target=lambda *a, **k: "target")
module("eagle3_train.device", resolve_device=lambda name: name, resolve_dtype=lambda name, device: name)
module("eagle3_train.capture", captured_rows=lambda cfg: {}, capture=capture, roll=roll, share_passes=share_passes)
module("eagle3_train.train", train=train, load_head=lambda cfg, device: "head")
module("eagle3_train.evaluate", measure=measure, check_target=lambda cfg, folder: None)
module(
    "analysis",
    load_runs=lambda folders: folders,
    analyse=lambda runs: [path.name for path in runs],
    summary_text=lambda names: f"summary of {', '.join(names)}",
    write_report=write_report,
)
