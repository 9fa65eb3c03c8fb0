"""The command line: help for every step, one clear line for every mistake, no heavy import at start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_train import cli, config, help
from eagle3_train.exits import Unfinished, why
from eagle3_train.steps import STEPS
from eagle3_train.store import commands as store_commands

ROOT = Path(__file__).parents[1]


def eagle3(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    out, err = capsys.readouterr()
    code = end.value.code
    return int(code or 0), out, err


def test_help_lists_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = eagle3(capsys, "--help")
    assert code == 0
    for name, step in STEPS.items():
        assert f"  {name}" in out
        assert step.summary in out


@pytest.mark.parametrize("name", STEPS)
def test_help_of_a_step_has_its_keys_with_their_values_and_meanings(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = eagle3(capsys, name, "--help")
    assert code == 0
    for key in STEPS[name].keys:
        assert f"  {key}=" in out
    for example in STEPS[name].examples:
        assert f"  {example}" in out


def test_help_shows_present_values_and_the_comments_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = eagle3(capsys, "train", "draft.steps=7", "--help")
    assert "draft.steps=7" in out
    assert "K: training-time-test steps" in out  # behind the field in config/schema.py
    _, out, _ = eagle3(capsys, "capture", "--help")
    assert "auto: bf16 where the device has fast bf16" in out  # above the field


def test_every_key_in_the_help_exists_and_is_explained() -> None:
    for step in STEPS.values():
        assert set(step.keys) <= set(help.all_keys())
        assert [key for key in step.keys if not help._comment(key)] == []


@pytest.mark.parametrize("name", ["study", "store"])
def test_help_lists_the_commands_of_a_step(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = eagle3(capsys, name, "--help")
    words = {command.split()[0] for command in STEPS[name].commands}
    assert all(f"\n  {word} " in out for word in words)
    if name == "store":  # the parser's own commands, no more and no fewer
        with pytest.raises(SystemExit):
            store_commands.main(["--help"])
        assert set(capsys.readouterr().out.partition("{")[2].partition("}")[0].split(",")) == words


def test_of_repeated_overrides_the_last_holds() -> None:
    cfg = config.compose(
        ["seed=1", "engine=ddp", "seed=2", "engine=fsdp2", "target.chat_template_args={thinking: false}"]
    )
    assert (cfg.seed, cfg.engine.kind) == (2, "fsdp2")
    assert cfg.target.chat_template_args == {"thinking": False}


def test_power_tells_beforehand_what_a_design_sees(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    class Answer:
        def text(self) -> str:
            return "a gain of 0.02"

    def power(scales: list[float], seeds: int, **sizes: object) -> Answer:
        asked.update(sizes, scales=scales, seeds=seeds)
        return Answer()

    monkeypatch.setattr("analysis.power", power)
    code, out, _ = eagle3(capsys, "study", "power", "data.scale=1,4", "seed=0,1,2", "draft.steps=5")
    assert (code, out) == (0, "a gain of 0.02\n")
    assert (asked["scales"], asked["seeds"], asked["tasks"], asked["draft_steps"]) == ([1, 4], 3, 2, 5)


def test_cfg_job_prints_a_configuration_that_a_launcher_can_pass_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = eagle3(capsys, "train", "data.scale=4", "--cfg", "job")
    assert code == 0
    (tmp_path / "config.yaml").write_text(out)
    assert config.load(tmp_path / "config.yaml") == config.compose(["data.scale=4"])
    _, again, _ = eagle3(capsys, "train", "--resolved", str(tmp_path / "config.yaml"), "--cfg", "job")
    assert again == out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "no step 'trian': did you mean train?"),
        (["xyz"], "the steps are prepare, regenerate, capture,"),
        (["train", "data.scal=2"], "did you mean data.scale?"),
        (["train", "lr=1"], "did you mean optim.lr?"),
        (["study", "drft=a,b"], "did you mean draft?"),
        (["train", "draf=eagle3"], "did you mean draft"),
        (["train", "data.scale=many"], "data.scale=many: Value 'many' of type 'str' could not be converted to Float"),
        (
            ["train", "draft=eagle9"],
            "draft=eagle9: there is none: did you mean eagle3 or eagle1?\navailable for draft: ",
        ),
        (["study", "study=quikstart"], "did you mean quickstart?"),
        (["study", "study.axes=3"], "the axes are a mapping"),
        (["study", "study.axes={seed: []}"], "axis seed has no values"),
        (["study", "study.axes={sed: [0]}"], "no key 'sed': did you mean seed?"),
        (["study", "power", "a", "b"], "takes one word"),
        (["train", "draft.kind=eagle9"], "draft.kind='eagle9' is not one of"),
        (["train", "data.scale=[1"], "'data.scale=[1' is no override"),
        (["train", "data.scale=1,2"], "`eagle3 study` takes them"),
        (["train", "paths.outputs=/tmp/ü"], "need quotes, and the shell its own: 'paths.outputs=\"/tmp/ü\"'"),
        (["train", "seed"], "'seed' is no override: write KEY=VALUE"),
        (["train", "--resolved"], "--resolved needs the file"),
        (["train", "--resolved", "/none.yaml"], "/none.yaml: no such file"),
        (["train", "--cfg", "hydra"], "`--cfg job`"),
        (
            ["prepare", "eval.tasks=[{name: gsm, source: held_out}]"],
            "not among eval.tasks: give eval.decode_tasks=[gsm] or eval.decode_tasks=[]",
        ),
        (["evaluate"], "run `eagle3 train` with the same overrides first"),
        (["study", "status"], "holds no study yet"),
        (
            ["study", "dance"],
            "may stand status [--json | --watch], logs JOB, retry [JOB...], cancel, tune, power [PILOT]",
        ),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_mistake_is_named_in_two_lines_at_most_and_exit_code_2(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = eagle3(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") <= 2
    assert not any(tmp_path.iterdir())  # before any work


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        (["draft=medusa", "draft.eagle1.noise=0.1", "draft.medusa.layers=1"], "draft.eagle1.noise"),
        (["draft=medusa", "draft.init_layer=random", "draft.steps=3"], "draft.init_layer"),
        (["draft=eagle1", "draft.eagle1.noise=0.1"], None),
    ],
    ids=lambda v: str(v),
)
def test_options_of_other_heads_on_the_command_line_are_noted(
    overrides: list[str], unread: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, out, err = eagle3(capsys, "train", f"paths.outputs={tmp_path}", *overrides)
    assert "error: " in err  # there is no store
    kind = overrides[0].removeprefix("draft=")
    assert out == (f"note: {unread}: not read by draft heads of kind {kind}\n" if unread else "")


def test_resolved_and_overrides_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    config.save(config.compose([]), path)
    code, _, err = eagle3(capsys, "train", "--resolved", str(path), "seed=1")
    assert code == 2
    assert "takes no overrides" in err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_DEBUG", "1")
    with pytest.raises(ValueError, match="no step"):
        cli.main(["trian"])


def test_a_bug_is_not_hidden() -> None:
    def bug() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        cli.guarded(bug)


def test_ctrl_c_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert cli.guarded(interrupted) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_ctrl_c_while_it_starts_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # as from a terminal
    start = f"{hears}; from eagle3_train.start import main; main()"
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])}
    done = subprocess.run([sys.executable, "-c", start], env=os.environ | paths, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_step_of_a_launcher_leaves_it_to_say_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cli.SUPERVISED, "1")
    monkeypatch.setattr(cli, "_end_with_parent", lambda: None)

    def ended() -> int:
        raise Unfinished("stopped by SIGTERM")

    assert cli.guarded(ended) == 143
    assert capsys.readouterr().err == "\nstopped by SIGTERM\n"


def test_sigterm_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def ended() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert cli.guarded(ended) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["study", "dry_run=true"]], ids=" ".join)
def test_the_command_line_starts_without_heavy_imports(arguments: list[str], tmp_path: Path) -> None:
    code = f"""
import sys
from eagle3_train import cli
try:
    cli.main({arguments!r})
finally:
    assert not {{"torch", "transformers", "matplotlib", "pandas", "pyarrow"}} & set(sys.modules)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)


def test_what_ended_a_process_is_said_in_words_not_by_a_class_of_ours() -> None:
    ends = [Unfinished("stopped by SIGTERM"), KeyboardInterrupt(), OSError()]
    assert [why(e) for e in ends] == ["stopped by SIGTERM", "Ctrl-C", "OSError"]


def test_a_process_of_a_launcher_ends_without_tearing_down_its_heap() -> None:
    """Which takes seconds with torch in it, while the launcher waits. What the step registered for the exit still runs;
    what was registered before it began stands for all that comes after that."""
    script = """if True:
        import atexit
        from eagle3_train import cli
        atexit.register(print, "torn down")
        def dispatch(arguments):
            atexit.register(print, "registered")
            print("unflushed")
            return 3
        cli._dispatch = dispatch
        cli.main([])
    """
    for supervised, out in (("1", "unflushed\nregistered\n"), ("", "unflushed\nregistered\ntorn down\n")):
        env = os.environ | {"PYTHONPATH": str(ROOT)} | ({cli.SUPERVISED: supervised} if supervised else {})
        with subprocess.Popen([sys.executable, "-c", script], env=env, stdin=-1, stdout=-1, text=True) as child:
            assert child.stdout
            assert child.stdout.read() == out
            assert child.wait(60) == 3  # before its standard input is closed, which would end it
