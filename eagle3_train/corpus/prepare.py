"""The step `prepare`: sources to token ids and loss masks, in the store's final order. Layout: docs/corpus.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3_train.config import Config, CorpusConfig, SourceConfig, TaskConfig, check_layer_ids, digest
from eagle3_train.console import progress_bar, say
from eagle3_train.files import read_json, write_json
from eagle3_train.target import chat_template_hash, load_tokenizer, prepare_target, stop_ids, tokenizer_hash

from .filters import Filters
from .messages import Conversation, Unusable
from .pool import Pool
from .readers import SourceReport, fingerprint, read_conversations, sources_of
from .report import Tally, show
from .rows import Row, RowWriter
from .tasks import prompt_rows, task_prompts
from .template import Encoded, Template

VERSION = 2  # of what this room makes of the same input: raised when rows would come out otherwise
REPORT = "report.json"


def prepare(cfg: Config) -> dict[str, Any]:
    """Write `paths.corpus`: train.parquet, validation.parquet, tasks/<task>.parquet, report.json. Returns the report.

    Done once: with the same options and input files it does nothing; a change that matters redoes it, and is named. An
    interrupted preparation starts from the beginning.

    Raises:
        ValueError: a missing file, a template that cannot be masked, too few usable conversations.
    """
    folder = Path(cfg.paths.corpus)
    target = prepare_target(cfg.target, cfg.paths.target)
    model = read_json(target / "config.json")
    check_layer_ids(cfg.capture.layer_ids, model.get("text_config", model)["num_hidden_layers"])
    identity = _identity(cfg, target)
    if (folder / REPORT).is_file():
        report = read_json(folder / REPORT)
        if report["identity"] == identity:
            say(f"corpus: {folder} is ready")
            return report
        say(
            f"corpus: preparing {folder} anew, since these changed: {', '.join(_changes(report['identity'], identity))}"
        )
        (folder / REPORT).unlink()  # from here on the folder is unfinished
    elif any(folder.glob("*.parquet")):
        say(f"corpus: {folder} was left unfinished; an interrupted preparation reads its sources anew")
    tokenizer = load_tokenizer(target, cfg.target.chat_template, cfg.target.trust_remote_code)
    template = Template(tokenizer, stop_ids(target, tokenizer), cfg.target.chat_template_args)
    with Pool(folder, cfg.corpus.seed, cfg.corpus.held_out_fraction) as pool:
        sources = {source.name: _fill(pool, source) for source in sources_of(cfg.corpus)}
        kept = pool.mix({source.name: source.weight for source in sources_of(cfg.corpus)})
        parts = _write(cfg, pool, template, folder)
        report = {
            "identity": identity,
            "digest": digest(identity, 16),
            "sources": {name: source.to_json() | {"kept": kept.get(name, 0.0)} for name, source in sources.items()},
            "usable": {"train": pool.size(held_out=False), "held_out": pool.size(held_out=True)},
            "parts": parts,
        }
    write_json(folder / REPORT, report)
    show(report)
    return report


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a prepared corpus; ValueError where there is none."""
    if not (folder / REPORT).is_file():
        raise ValueError(f"{folder} holds no corpus: run `eagle3 prepare` first")
    return read_json(folder / REPORT)


def task_origin(report: dict[str, Any], task: TaskConfig) -> dict[str, Any]:
    """What decided the prompts of `task` in the corpus of this report. ValueError where the task now asks for others,
    or the corpus has none of it."""
    found: dict[str, Any] | None = report["identity"].get(f"eval.tasks.{task.name}")
    now = task.prompt_identity
    changed = [k for k in now if found and now[k] is not None and now[k] != found[k]]
    if found is None or changed:
        what = f"with {', '.join(f'{k}={found[k]}, now {now[k]}' for k in changed)}" if found else "without it"
        raise ValueError(
            f"eval task {task.name!r}: the corpus was prepared {what}: run eagle3 prepare again, or restore the task"
        )
    return found


def _fill(pool: Pool, source: SourceConfig) -> SourceReport:
    report = SourceReport()
    for conversation in read_conversations(source, report):
        if not pool.add(conversation):
            report.dropped["exact duplicate"] += 1
    return report


def _identity(cfg: Config, target: Path) -> dict[str, Any]:
    """All that the rows depend on, flat, so that a difference has a name."""
    corpus = asdict(cfg.corpus)
    for name in ("format", "path", "sources"):
        del corpus[name]
    sources = {}
    for source in sources_of(cfg.corpus):
        sources[f"source {source.name}"] = asdict(source) | {"path": fingerprint(source)}
    tasks = {f"eval.tasks.{task.name}": task.prompt_identity for task in cfg.eval.tasks}
    return {
        "version": VERSION,
        **{f"corpus.{k}": v for k, v in corpus.items()},
        **sources,
        **tasks,
        "target.tokenizer": tokenizer_hash(target),
        "target.chat_template": chat_template_hash(target, cfg.target.chat_template),
        "target.chat_template_args": cfg.target.chat_template_args,
    }


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]


def _write(cfg: Config, pool: Pool, template: Template, folder: Path) -> dict[str, Any]:
    """Write all row files; returns the report of each, by its path within the folder less `.parquet`."""
    corpus, wanted = cfg.corpus, cfg.corpus.sequences
    tallies = {"train": Tally(), "validation": Tally()}
    filters = Filters(corpus.near_duplicates, corpus.contamination_words)
    taken: set[str] = set()
    n_validation, tally = corpus.validation_sequences, tallies["validation"]
    with RowWriter(folder / "validation.parquet") as writer:
        for group, row in _encoded(pool.walk(held_out=True), template, filters, corpus, n_validation, tally):
            writer.add(row)
            taken.add(group)
    _require(len(tally.lengths), n_validation, "held-out sequences", "corpus.validation_sequences", tally)
    for task in cfg.eval.tasks:
        tally = tallies[f"tasks/{task.name}"] = Tally()
        prompts = task_prompts(task, corpus.seed, pool, taken)
        with RowWriter(folder / "tasks" / f"{task.name}.parquet") as writer:
            for row in prompt_rows(task, prompts, template, filters, tally.skipped):
                writer.add(row)
                tally.row(row)
        _require(len(tally.lengths), task.prompts, f"{task.name} prompts", f"prompts of eval task {task.name!r}", tally)
    # Last, so that the filters know the held-out text and the prompts.
    tally = tallies["train"]
    with (
        RowWriter(folder / "train.parquet") as writer,
        progress_bar("tokenising", wanted or pool.size(held_out=False), "sequences") as bar,
    ):
        for _, row in _encoded(pool.walk(held_out=False), template, filters, corpus, wanted, tally):
            writer.add(row)
            bar.update(1)
    _require(len(tally.lengths), wanted, "training sequences", "corpus.sequences", tally)
    return {name: tally.to_json() for name, tally in tallies.items()}


def _encoded(
    conversations: Iterator[Conversation],
    template: Template,
    filters: Filters,
    cfg: CorpusConfig,
    wanted: int | None,
    tally: Tally,
) -> Iterator[tuple[str, Row]]:
    """(group, row) of the first `wanted` usable conversations; what is passed over is counted in `tally`."""
    for conversation in conversations:
        if wanted is not None and len(tally.lengths) >= wanted:
            return
        try:
            encoded = _encode(conversation, template, cfg.max_length)
            if int(encoded.loss_mask.sum()) < cfg.min_supervised:
                raise Unusable(f"fewer than {cfg.min_supervised} supervised tokens")
            filters.check(_texts(conversation, template))
        except Unusable as e:
            tally.skipped[str(e)] += 1
            continue
        row = Row(conversation.sample_id, conversation.source, encoded.input_ids, encoded.loss_mask)
        tally.encoded(encoded)
        tally.row(row)
        yield conversation.group, row


def _encode(conversation: Conversation, template: Template, max_length: int) -> Encoded:
    if conversation.messages:
        return template.encode(conversation.messages, max_length)
    return template.cut(conversation.input_ids, conversation.loss_mask, max_length)


def _texts(conversation: Conversation, template: Template) -> list[str]:
    if conversation.messages:
        return [m["content"] for m in conversation.messages]
    return [str(template.tokenizer.decode(conversation.input_ids))]


def _require(found: int, wanted: int | None, what: str, key: str, tally: Tally) -> None:
    if found == 0 or (wanted is not None and found < wanted):
        skipped = "; ".join(f"{n} {reason}" for reason, n in tally.skipped.items()) or "none"
        raise ValueError(
            f"only {found} usable {what} of the {wanted or 'at least 1'} that {key} asks for (passed over: {skipped}): "
            f"lower {key}, or give more data"
        )
