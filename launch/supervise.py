"""Run one command as a child process group: output to `log.txt` and the terminal, state to `status.json`.

The same function runs a step on a laptop and inside a cluster's job. The child's standard input is a pipe that nobody
writes to. When this process dies, however it dies, the pipe closes, and `eagle3` (cli.py) ends itself on that: no
orphan goes on writing into a folder that a second attempt has taken over.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from eagle3_train.console import say
from eagle3_train.exits import REQUEUE, SUPERVISED, why
from eagle3_train.files import code_state, read_json, write_json, write_text

GRACE_S = 20.0  # from SIGTERM to SIGKILL: time for a checkpoint
TAIL_LINES = 15
KILLED = [128 + n for n in (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2)]
TASK_LINES = 1000  # of srun, one a node or so, and what the tasks still say
TITLE = "--- attempt "  # begins the line of log.txt above the output of an attempt


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `state`: done | failed | busy (another process has it), or why it was stopped: lost (another
    process took it over) | cancelled | preempted (also by itself: a signal to a rank, its own time limit)."""

    state: str
    seconds: float = 0.0
    reason: str = ""
    tail: list[str] = field(default_factory=list)  # last lines of the log, of a failure

    def text(self, name: str) -> str:
        """How job `name` ended, with the last lines of its log."""
        return "\n".join([f"{name}: {self.state}: {self.reason}", *(f"    {line}" for line in self.tail)])


def cut_short(outcome: Outcome) -> bool:
    """Whether the step was ended from outside, so that another attempt may well succeed. srun reports a task that was
    killed by signal n with the exit code 128 + n."""
    killed = [f"exit code {code}" for code in KILLED]
    return outcome.state == "preempted" or outcome.reason in killed or outcome.reason.startswith("killed by")


def supervise(
    command: Sequence[str],
    folder: Path,
    name: str,
    env: dict[str, str] | None = None,
    stop: Callable[[], str] = lambda: "",
    terminate: Callable[[], None] | None = None,
    grace: float = GRACE_S,
) -> Outcome:
    """Run `command`, wait for it, and say how it ended. `env` adds to the environment.

    `stop` is asked twice a second; when it returns a state (see `Outcome`) the child is ended, and that is the outcome.
    An exception in this thread (Ctrl-C, SIGTERM as cli.py raises it) ends the child too, and goes on upwards.
    `terminate` tells the child to end, by default by SIGTERM to its group; after `grace` seconds it is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = time.time()
    status = _begin(folder, command, started)
    with open(folder / "log.txt", "ab", buffering=0) as log:
        title = f"{TITLE}{status['attempt']}, {_clock(started)}, {status['host']}: {' '.join(command)}\n"
        log.write(title.encode())
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", SUPERVISED: "1"} | (env or {}),
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the child in good order
        )
        tell = terminate or (lambda: _signal(child, signal.SIGTERM))
        try:
            stopped = _forward(child, log, name, stop)
        except BaseException as e:
            _end(child, log, name, tell, grace)
            note_end(folder, "stopped", why(e))
            raise
        if stopped:
            _end(child, log, name, tell, grace)
    seconds = time.time() - started
    if stopped == "lost":  # the files are another process's now
        return Outcome(stopped, seconds, "another process has taken this job over")
    if stopped:
        note_end(folder, "stopped", stopped)
        return Outcome(stopped, seconds)
    if child.returncode == 0:
        note_end(folder, "done", "")
        return Outcome("done", seconds)
    if child.returncode == REQUEUE:
        reason = "stopped before its end; run again, it continues"
        note_end(folder, "stopped", reason)
        return Outcome("preempted", seconds, reason)
    reason = _reason(child.returncode)
    note_end(folder, "failed", reason)
    return Outcome("failed", seconds, reason, last_words(folder))


def last_words(folder: Path) -> list[str]:
    """The last lines of a job's log, of its last attempt."""
    return _of_last_attempt(tail(folder / "log.txt"))


def _of_last_attempt(lines: list[str]) -> list[str]:
    begins = [number for number, line in enumerate(lines) if line.startswith(TITLE)]
    return lines[begins[-1] + 1 if begins else 0 :]


def failed_task(folder: Path) -> int | None:
    """Exit code of the task of srun that ended first in the last attempt, where it was not cut short itself.

    When one task fails, srun ends the others, and reports the highest code of all: that of those that it ended.
    """
    lines = _of_last_attempt(tail(folder / "log.txt", TASK_LINES))
    ended = [m[1] for line in lines if (m := re.search(r"^srun: error: .*Exited with exit code (\d+)$", line))]
    return int(ended[0]) if ended and int(ended[0]) not in KILLED else None


def tail(log: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log that are not empty. Reads the end of the file only."""
    if not log.is_file():
        return []
    with open(log, "rb") as f:
        f.seek(max(0, log.stat().st_size - 400 * lines))
        text = f.read().decode(errors="replace")
    return [line.rsplit("\r")[-1] for line in text.splitlines() if line.strip()][-lines:]


def _forward(child: subprocess.Popen[bytes], log: IO[bytes], name: str, stop: Callable[[], str]) -> str:
    """Copy the child's output until it ends, or until `stop` returns something, which is returned. A grandchild that
    keeps the pipe open (wandb's service) is not waited for."""
    assert child.stdout
    pipe, partial, is_logged = child.stdout.fileno(), b"", True
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            ended = child.poll() is not None
            ready = selector.select(timeout=0 if ended else 0.5)
            data = os.read(pipe, 65536) if ready else b""
            if is_logged:
                try:
                    log.write(data)
                except OSError as e:  # a full disk: no reason to end what runs
                    is_logged = False
                    say(f"{name}: {log.name} cannot be written any more ({e.strerror}): what follows is here alone")
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                _show(name, line)
            if ended and not data:
                _show(name, partial)
                return ""
            if ready and not data:  # closed its output, still running
                child.wait()
            if not ended and (reason := stop()):
                return reason


def _show(name: str, line: bytes) -> None:
    # Of a bar that was drawn over and over with carriage returns, the last drawing.
    if text := line.decode(errors="replace").rstrip().rsplit("\r")[-1]:
        own = re.sub(rf"^(\[rank \d+\] )?{re.escape(name)}: ", r"\1", text)  # a point begins its lines with its name
        say(f"{name} | {own}")


def _end(child: subprocess.Popen[bytes], log: IO[bytes], name: str, tell: Callable[[], None], grace: float) -> None:
    """Tell the child to end; SIGKILL after the grace or at a second Ctrl-C. Closing standard input ends what is left:
    torchrun puts its ranks into sessions of their own, which no signal to the group reaches."""
    deadline = time.monotonic() + grace
    try:
        tell()
        _forward(child, log, name, lambda: "late" if time.monotonic() > deadline else "")
    finally:
        assert child.stdin
        child.stdin.close()
        _signal(child, signal.SIGKILL)
        child.wait()


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all of the group has ended
        os.killpg(child.pid, number)


def _begin(folder: Path, command: Sequence[str], started: float) -> dict[str, Any]:
    path = folder / "status.json"
    try:
        last = read_json(path) if path.is_file() else {}
    except ValueError:  # damaged: it is bookkeeping, and written anew below
        last = {}
    attempt = last.get("attempt", 0) + 1 if isinstance(last, dict) else 1
    version, changes = code_state()
    if changes:
        write_text(folder / "code.diff", changes)
    else:
        (folder / "code.diff").unlink(missing_ok=True)
    status = {
        "state": "running",
        "attempt": attempt,
        "stalled": last.get("stalled", 0) if isinstance(last, dict) else 0,  # kept by launch/worker.py
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": list(command),
        "code": version,
        "started": started,
    }
    write_json(path, status)
    return status


def note_end(folder: Path, state: str, reason: str) -> None:
    """Write into status.json how the last attempt ended."""
    path = folder / "status.json"
    write_json(path, read_json(path) | {"state": state, "reason": reason, "ended": time.time()})


def _reason(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
