"""`eagle3 STEP [key=value ...]`: one thin entry point a step, over the configuration in `conf/`.

What a user got wrong is a line or two and exit code 2, without a traceback (EAGLE3_DEBUG=1 shows it); a failed job is
exit code 1; Ctrl-C is exit code 130; SIGTERM, and training that a signal or its time limit stopped in good order, is
exit code 143, which means: the same command continues.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from eagle3_train.exits import FAILED, INTERRUPTED, MISTAKE, REQUEUE, SUPERVISED, Unfinished
from eagle3_train.help import all_keys, did_you_mean, groups, overview, step_help
from eagle3_train.steps import STEPS, Call, run_step

HELP = {"-h", "--help"}
# OSError: a full disk, a folder that cannot be written; ArithmeticError: a loss that is not finite, a number too large.
MISTAKES = (ValueError, OSError, ArithmeticError, HydraException, OmegaConfBaseException)
OMEGACONF = ("full_key:", "object_type=", "reference_type=")  # its lines on where, after those on what
OTHER_RANKS_WAIT_S = 3.0  # before they say what the user got wrong
AGAIN = "the same command continues from what is finished"


class Failed(Exception):
    """A job that a command started did not succeed; the message says how. Exit code 1, no traceback."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `eagle3` with the arguments after its name, and exit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    codes: list[int] = []
    if SUPERVISED in os.environ:
        atexit.register(_leave, codes)  # the first to be registered, which is the last to run
    codes.append(guarded(lambda: _dispatch(arguments)))
    sys.exit(codes[0])


def guarded(action: Callable[[], int | None]) -> int:
    """Run `action` as a command: mistakes as one line, signals as exit codes."""
    supervised = os.environ.pop(SUPERVISED, None)
    again = "" if supervised else f"; {AGAIN}"  # our launcher says it
    if supervised:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return action() or 0
    except KeyboardInterrupt:
        if _is_first():
            print(f"\nstopped{again}", file=sys.stderr)
        return INTERRUPTED
    except Unfinished as e:
        if e.how:
            print(f"\n{e.how}{again}", file=sys.stderr)
        return REQUEUE
    except Failed as e:
        print(f"failed: {e}", file=sys.stderr)
        return FAILED
    except MISTAKES as e:
        if os.environ.get("EAGLE3_DEBUG"):
            raise
        if not _is_first():  # as a rule rank 0 says the same, and torchrun ends us meanwhile
            time.sleep(OTHER_RANKS_WAIT_S)
        print(f"error: {explain(e)}", file=sys.stderr)
        return MISTAKE


def _is_first() -> bool:
    """Whether this is the one of several ranks that speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def explain(error: BaseException) -> str:
    """An error in words, with the nearest key, group or option where an unknown one was given."""
    if isinstance(error, OverrideParseException):
        key, is_pair, value = str(error.override).partition("=")
        quoted = f"'{key}=\"{value}\"'" if is_pair else "KEY=VALUE"
        return f"{error.override!r} is no override: special characters need quotes, and the shell its own: {quoted}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_option(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" (writing {error.filename})" if error.filename else ""
        return f"the disk is full{where}: free some space; {AGAIN}"
    text = str(error).partition("Config search path:")[0].partition("See https://hydra.cc")[0]
    if error.__cause__ is not None and isinstance(error, HydraException):
        text += "\n" + str(error.__cause__)
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.strip().startswith(OMEGACONF)]
    words = "\n".join(dict.fromkeys(lines))
    if words.startswith("Could not override '") or isinstance(error, ConfigKeyError | ConfigAttributeError):
        key = getattr(error, "full_key", None) or words.split("'")[1]
        hint = did_you_mean(key, [*all_keys(), *groups()])
        return f"there is no key {key!r}{hint} (`eagle3 STEP --cfg job` prints all keys)"
    if words.startswith("Error merging override ") and len(lines) > 1:
        return f"{lines[0].removeprefix('Error merging override ')}: {lines[-1]}"
    if words.startswith("Ambiguous value for argument '"):
        return f"{words.split(chr(39))[1]} has several values: `eagle3 study` takes them, a single step takes one"
    if isinstance(error, OmegaConfBaseException) and error.full_key and error.full_key not in words:
        return f"{error.full_key}: {words}"
    return words


def _no_option(error: MissingConfigException) -> str:
    """A config group has no such file in conf/."""
    group, _, option = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
    known = [str(name) for name in error.options or ()]
    return f"{group}={option}: there is none{did_you_mean(option, known)}\navailable for {group}: {', '.join(known)}"


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in HELP:
        print(overview(STEPS))
        return 0
    if arguments[0] == "--version":
        from eagle3_train.files import code_version

        print(f"eagle3 {code_version()}")
        return 0
    name, *rest = arguments
    if name not in STEPS:
        hint = did_you_mean(name, STEPS) or f": the steps are {', '.join(STEPS)}"
        raise ValueError(f"there is no step {name!r}{hint}")
    step = STEPS[name]
    if step.parses_itself and rest and not HELP & {rest[0]}:
        return step.run(Call([], rest))
    show = "--cfg" in rest
    if show:
        at = rest.index("--cfg")
        if rest[at + 1 : at + 2] != ["job"]:
            raise ValueError("--cfg takes one word: `--cfg job` prints the resolved configuration")
        del rest[at : at + 2]
    call = _parse(name, rest)
    if call.words and set(call.words) <= HELP:
        print(step_help(name, step, call.config()))
        return 0
    if show:
        print(OmegaConf.to_yaml(OmegaConf.structured(call.config())), end="")
        return 0
    return run_step(name, call)


def _parse(name: str, rest: list[str]) -> Call:
    """Sort the arguments of a step into overrides, `--resolved FILE` and other words."""
    rest, resolved = list(rest), None
    if "--resolved" in rest:
        at = rest.index("--resolved")
        if at + 1 == len(rest):
            raise ValueError("--resolved needs the file of a resolved configuration (a config.yaml of a run)")
        resolved = Path(rest[at + 1])
        if not resolved.is_file():
            raise ValueError(f"--resolved {resolved}: no such file")
        del rest[at : at + 2]
    overrides = [word for word in rest if ("=" in word and word[0] != "-") or word[0] == "~"]
    words = [word for word in rest if word not in overrides]
    if set(words) - HELP and not STEPS[name].takes_words:
        raise ValueError(f"{words[0]!r} is no override: write KEY=VALUE (`eagle3 {name} --help` explains)")
    return Call(overrides, words, resolved)


def _leave(codes: list[int]) -> None:
    """End without collecting what is left of the heap, object by object: with torch and transformers in it that takes
    seconds, on a busy machine longer than a launcher waits. `codes`: the exit code; empty after a traceback."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(codes[0] if codes else FAILED)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Unfinished(f"stopped by {signal.Signals(number).name}")


def _end_with_parent() -> None:
    """Wait until the supervising process is gone, which closes our standard input; then end as if it had told us to."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)  # for a checkpoint
    os._exit(REQUEUE)


if __name__ == "__main__":
    # The module under its own name: sweeps imports it too, and there must be one class `Failed`, not two.
    from eagle3_train.cli import main as run

    run()
