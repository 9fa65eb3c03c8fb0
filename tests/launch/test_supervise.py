"""A supervised command: its output, its state, and that nothing of it outlives its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from eagle3_train import files
from launch import supervise as supervise_module
from launch.supervise import last_words, supervise, tail


def script(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


def status(folder: Path) -> dict[str, object]:
    value: dict[str, object] = json.loads((folder / "status.json").read_text())
    return value


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(path: Path) -> str:
    for _ in range(200):
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} never came")


def wait_until_dead(pid: int, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.05)


def test_a_job_that_says_its_name_itself_is_not_named_twice(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
        print("x1:  6 %")
        print("[rank 0] x1: 18 steps")
        print("error: x1: no")
    """
    supervise(script(text), tmp_path, "x1")
    assert capfd.readouterr().out.splitlines() == ["x1 |  6 %", "x1 | [rank 0] 18 steps", "x1 | error: x1: no"]
    assert "x1:  6 %" in (tmp_path / "log.txt").read_text()


def test_output_goes_to_the_log_and_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = supervise(
        script("""
            import os, sys
            print("hello", os.environ["COLOUR"])
            print("10 %\\r50 %\\r100 %", file=sys.stderr)
            print("the end", end="")
        """),
        tmp_path,
        "x1",
        env={"COLOUR": "green"},
    )
    assert outcome.state == "done"
    assert capfd.readouterr().out.splitlines() == ["x1 | hello green", "x1 | 100 %", "x1 | the end"]
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith("--- attempt 1, ")
    assert "hello green\n" in log
    assert status(tmp_path)["state"] == "done"


def test_lines_come_while_the_command_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    go = tmp_path / "go"
    command = script(f"""
        import os, time
        print("first")
        while not os.path.exists({str(go)!r}): time.sleep(0.02)
    """)
    thread = threading.Thread(target=supervise, args=[command, tmp_path / "job", "x1"])
    thread.start()
    seen = ""
    for _ in range(200):
        seen += capfd.readouterr().out
        if "first" in seen:
            break
        time.sleep(0.05)
    go.touch()
    thread.join()
    assert seen == "x1 | first\n"


def test_failure_has_exit_code_and_last_lines(tmp_path: Path) -> None:
    command = script("""
        import sys
        for i in range(100): print("line", i)
        sys.exit(7)
    """)
    outcome = supervise(command, tmp_path, "x1")
    assert (outcome.state, outcome.reason) == ("failed", "exit code 7")
    assert outcome.tail == [f"line {i}" for i in range(85, 100)]
    assert status(tmp_path)["reason"] == "exit code 7"
    assert supervise(script("pass"), tmp_path, "x1").state == "done"
    assert status(tmp_path)["attempt"] == 2
    assert "line 99" in (tmp_path / "log.txt").read_text()  # the log of the first attempt is kept
    assert last_words(tmp_path) == []  # and is not the second's


def test_a_killed_command_is_told_from_a_failed_one(tmp_path: Path) -> None:
    outcome = supervise(script("import os; os.kill(os.getpid(), 9)"), tmp_path, "x1")
    assert outcome.reason == "killed by SIGKILL (out of memory?)"


def test_a_grandchild_that_keeps_the_output_open_is_not_waited_for(tmp_path: Path) -> None:
    started = time.monotonic()
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(8)'])"
    assert supervise([sys.executable, "-c", code], tmp_path, "x1").state == "done"
    assert time.monotonic() - started < 5


def test_losing_the_lock_ends_the_command(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = script(f"""
        import os, time
        open({str(pid_file)!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    """)
    outcome = supervise(command, tmp_path, "x1", stop=lambda: "lost" if pid_file.exists() else "")
    assert outcome.state == "lost"
    assert not is_alive(int(wait_for(pid_file)))


SUPERVISOR = """
    import sys
    from pathlib import Path
    from eagle3_train.cli import guarded
    from launch import supervise
    supervise.GRACE_S = 2.0
    sys.exit(guarded(lambda: supervise.supervise([sys.executable, "-c", sys.argv[2]], Path(sys.argv[1]), "x1") and 0))
"""
# A process with a child of its own in the same group. What it does at SIGTERM is the test's choice.
FAMILY = """
import os, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
signal.signal(signal.SIGTERM, {handler})
time.sleep(0.5)
open({pids!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(60)
"""


def start_family(tmp_path: Path, handler: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    family = FAMILY.format(handler=handler, pids=str(tmp_path / "pids"))
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    supervisor = subprocess.Popen([*script(SUPERVISOR), str(tmp_path / "job"), family], env=env)
    return supervisor, [int(pid) for pid in wait_for(tmp_path / "pids").split()]


def test_a_step_that_asks_to_be_continued_has_not_failed(tmp_path: Path) -> None:
    outcome = supervise(script("raise SystemExit(143)"), tmp_path, "x1")
    assert outcome.state == "preempted"  # so a worker on a cluster requeues it
    assert status(tmp_path)["state"] == "stopped"


def test_the_code_that_ran_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "clone"
    file = clone / "eagle3_train" / "files.py"
    file.parent.mkdir(parents=True)
    file.write_bytes("a = 'ä'\n".encode("latin-1"))
    me = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for words in (["init", "-q"], ["add", "."], [*me, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", clone, *words], check=True)
    monkeypatch.setattr(files, "__file__", str(file))
    supervise(script(""), tmp_path / "job", "x1")
    version = status(tmp_path / "job")["code"]
    assert re.fullmatch(r".+\+g[0-9a-f]{12}", version)
    assert not (tmp_path / "job" / "code.diff").exists()
    file.write_text("a = 2\n")
    supervise(script(""), tmp_path / "job", "x1")
    assert status(tmp_path / "job")["code"] == f"{version}+dirty"
    assert (tmp_path / "job" / "code.diff").read_text().endswith("+a = 2\n")


@pytest.mark.parametrize(
    ("number", "code", "reason"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "stopped by SIGTERM")]
)
def test_interrupting_ends_all_children(tmp_path: Path, number: signal.Signals, code: int, reason: str) -> None:
    supervisor, pids = start_family(tmp_path, "lambda *a: sys.exit(3)")
    started = time.monotonic()
    supervisor.send_signal(number)
    assert supervisor.wait(timeout=120) == code
    assert time.monotonic() - started < 3
    for pid in pids:
        wait_until_dead(pid)
    assert (status(tmp_path / "job")["state"], status(tmp_path / "job")["reason"]) == ("stopped", reason)


def test_children_that_ignore_the_signal_are_killed_after_the_grace(tmp_path: Path) -> None:
    supervisor, pids = start_family(tmp_path, "signal.SIG_IGN")
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(timeout=120) == 130
    for pid in pids:
        wait_until_dead(pid)


def test_a_step_ends_itself_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    step = f"""
import os, sys, time
from eagle3_train.cli import guarded
def work():
    open({str(tmp_path / "pids")!r}, "w").write(str(os.getpid()))
    time.sleep(60)
sys.exit(guarded(work))
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    supervisor = subprocess.Popen([*script(SUPERVISOR), str(tmp_path / "job"), step], env=env)
    pid = int(wait_for(tmp_path / "pids"))
    supervisor.kill()
    supervisor.wait()
    wait_until_dead(pid)


def test_tail_reads_the_end_only(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("".join(f"{i} {'x' * 200}\n\n" for i in range(10_000)))
    assert [line.split()[0] for line in tail(log, 3)] == ["9997", "9998", "9999"]
    assert tail(tmp_path / "none") == []


def test_a_log_that_cannot_be_written_ends_no_job(capfd: pytest.CaptureFixture[str]) -> None:
    command = script("""
        print("first", flush=True)
        print("second")
    """)
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with open("/dev/full", "wb", buffering=0) as full:
        assert supervise_module._forward(child, full, "x1", lambda: "") == ""
    out = capfd.readouterr().out
    assert out.count("cannot be written any more") == 1
    assert "x1 | first" in out
    assert "x1 | second" in out
