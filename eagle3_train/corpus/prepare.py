"""The step `prepare`: sources to token ids and loss masks, in the store's final order. Layout: docs/corpus.md."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3_train.config import Config, CorpusConfig, SourceConfig, digest, layer_ids
from eagle3_train.console import progress_bar, say
from eagle3_train.files import read_object, sweep_temporaries, temporary_path, write_json
from eagle3_train.target import (
    chat_template_hash,
    load_tokenizer,
    prepare_target,
    stop_ids,
    text_config,
    tokenizer_hash,
)

from .filters import Filters
from .messages import Conversation, Unusable
from .pool import Pool
from .readers import SourceReport, fingerprint, read_conversations, sources_of
from .report import Tally, show
from .rows import ANEW, Row, RowWriter
from .tasks import Prompts, prompt_rows, read_prompts, task_prompts
from .template import Encoded, Template

VERSION = 2  # of what this room makes of the same input: raised when rows would come out otherwise
REPORT = "report.json"
CONTENTS = ("path", "file")  # of a source and of a task: hashes of what the files hold
MISSING = object()  # a key that is not there differs from one that is null
TASK = "eval.tasks."  # + name: what the prompts of a task depend on


def prepare(cfg: Config, captured: Mapping[str, tuple[str, str]] | None = None) -> dict[str, Any]:
    """Write `paths.corpus`: train.parquet, validation.parquet, tasks/<task>.parquet, report.json. Returns the report.

    Done once: with the same options and input files it does nothing; a change that matters redoes it, and is named. An
    interrupted preparation starts from the beginning. What is there stays until all of the new is written.

    Args:
        captured: of each part of the report that was captured: the store, and the content of the rows that it holds.

    Raises:
        ValueError: a missing file, a template that cannot be masked, too few usable conversations; rows of the corpus
            that is there would change, and a store holds them.
    """
    folder = Path(cfg.paths.corpus)
    target = prepare_target(cfg.target, cfg.paths.target)
    model = text_config(target)
    layer_ids(cfg.capture, model["num_hidden_layers"])
    identity = _identity(cfg, target)
    previous: dict[str, Any] | None = None
    if (folder / REPORT).is_file():
        report = previous = _read_report(folder)
        if not (changes := _changes(report["identity"], identity)):
            say(f"corpus: {folder} is ready")
            return report
        say(f"corpus: preparing {folder} anew, since these changed: {', '.join(changes)}")
    elif any(folder.glob("*.parquet")):
        say(f"corpus: {folder} was left unfinished; an interrupted preparation reads its sources anew")
    tokenizer = load_tokenizer(target, cfg.target.chat_template, cfg.target.trust_remote_code)
    template = Template(tokenizer, stop_ids(target, tokenizer), cfg.target.chat_template_args)
    vocabulary = min(len(tokenizer), model["vocab_size"])
    prompts = read_prompts(cfg.eval.tasks)  # small files: what is wrong with them shows before the sources are read
    with _aside(folder) as aside, Pool(aside, cfg.corpus.seed, cfg.corpus.held_out_fraction) as pool:
        sources = {source.name: _fill(pool, source, vocabulary) for source in sources_of(cfg.corpus)}
        kept = pool.mix({source.name: source.weight for source in sources_of(cfg.corpus)})
        parts = _write(cfg, pool, template, aside, sources, prompts)
        report = {
            "identity": identity,
            "digest": digest(identity, 16),
            "sources": {name: source.to_json() | {"kept": kept.get(name, 0.0)} for name, source in sources.items()},
            "usable": {"train": pool.size(held_out=False), "held_out": pool.size(held_out=True)},
            "parts": parts,
        }
        if previous is not None:
            _refuse_lost_rows(folder, previous, report, captured or {})
        (folder / REPORT).unlink(missing_ok=True)  # from here on the folder is unfinished
        for name in parts:
            file = folder / f"{name}.parquet"
            file.parent.mkdir(exist_ok=True)
            (aside / f"{name}.parquet").replace(file)
    write_json(folder / REPORT, report)
    show(report)
    return report


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A folder within `folder` for what is not whole yet: gone after the block, or, of a killed one, with the next."""
    name = folder / "unfinished"
    sweep_temporaries(name)
    aside = temporary_path(name)
    aside.mkdir(parents=True)
    try:
        yield aside
    finally:
        shutil.rmtree(aside)


def expect_report(cfg: Config, target: Path) -> dict[str, Any]:
    """The report of the corpus that `cfg` describes.

    Raises:
        ValueError: there is none, or one that was prepared otherwise, with the differences.
    """
    folder = Path(cfg.paths.corpus)
    if not (folder / REPORT).is_file():
        raise ValueError(f"{folder} holds no corpus: run `eagle3 prepare` first")
    report = _read_report(folder)
    found = report["identity"]
    wanted = _identity(cfg, target, found)
    # Prompts of more tasks than are asked for do no harm.
    found = {k: v for k, v in found.items() if k in wanted or not k.startswith(TASK)}
    if changes := in_words(found, wanted):
        raise ValueError(
            f"the corpus {folder} was prepared otherwise ({changes}): restore these values, "
            "or run `eagle3 prepare` with the new ones (the same overrides as here)"
        )
    return report


def _refuse_lost_rows(
    folder: Path, old: dict[str, Any], new: dict[str, Any], captured: Mapping[str, tuple[str, str]]
) -> None:
    """ValueError where rows that a store was captured from are others in the `new` report than in the `old`."""
    lost = []
    for part, (store, content) in captured.items():
        was, now = old["parts"].get(part), new["parts"].get(part)
        if was and now and was["content"] == content != now["content"]:
            lost.append((f"{part}: {was['tokens']:,} tokens, would be {now['tokens']:,}", store))
    if lost:
        stores = " ".join(store for _, store in lost)
        raise ValueError(
            f"these changes ({in_words(old['identity'], new['identity'])}) give the corpus {folder} other rows than "
            f"were captured ({'; '.join(rows for rows, _ in lost)}), and the store could not be used with them. The "
            "corpus is left as it was. Restore the values; or give the new ones a study of their own (study.name=NAME);"
            f" or give up what was captured: rm -r {stores}, and run `eagle3 prepare` again"
        )


def _read_report(folder: Path) -> dict[str, Any]:
    report = read_object(folder / REPORT, ANEW)
    if not all(isinstance(report.get(k), dict) for k in ("identity", "parts")):
        raise ValueError(f"{folder / REPORT} does not hold what it should: {ANEW}")
    return report


def _fill(pool: Pool, source: SourceConfig, vocabulary: int) -> SourceReport:
    """ValueError for token ids, of a tokenised source, that the target's tokenizer or embeddings have not."""
    report = SourceReport()
    for conversation in read_conversations(source, report):
        if (top := max(conversation.input_ids, default=0)) >= vocabulary:
            raise ValueError(
                f"corpus source {source.name!r}: record {conversation.sample_id} holds token {top}, and the target has "
                f"{vocabulary}: it was tokenised by another tokenizer than the target's"
            )
        if not pool.add(conversation):
            report.dropped["exact duplicate"] += 1
    return report


def _identity(cfg: Config, target: Path, prepared: dict[str, Any] | None = None) -> dict[str, Any]:
    """All that the rows depend on, flat, so that a difference has a name. `prepared`: that of a corpus that is there,
    which stands for files that are not on this machine."""
    corpus = asdict(cfg.corpus)
    for name in ("format", "path", "sources"):
        del corpus[name]
    sources = {}
    for source in sources_of(cfg.corpus):
        name = f"source {source.name}"
        known = None if prepared is None else prepared.get(name, {}).get("path")
        sources[name] = asdict(source) | {"path": _content(source, known)}
    tasks = {}
    for task in cfg.eval.tasks:
        name = f"{TASK}{task.name}"
        known = None if prepared is None else prepared.get(name, {}).get("file")
        tasks[name] = task.prompt_identity
        if task.path:
            tasks[name]["file"] = tasks[name]["file"] or known
    return {
        "version": VERSION,
        **{f"corpus.{k}": v for k, v in corpus.items()},
        **sources,
        **tasks,
        "target.tokenizer": tokenizer_hash(target),
        "target.chat_template": chat_template_hash(target, cfg.target.chat_template),
        "target.chat_template_args": cfg.target.chat_template_args,
    }


def _content(source: SourceConfig, known: Any) -> Any:
    """Fingerprint of a source; `known`, if there is one, where the files that it is of are not on this machine."""
    try:
        found = fingerprint(source)
    except ValueError:
        if known is None:
            raise
        return known
    return known if isinstance(known, str) and not isinstance(found, str) else found


def in_words(old: dict[str, Any], new: dict[str, Any]) -> str:
    """How two identities differ, key by key, for a person: no hashes, no whole mappings; empty if they do not."""
    changes = _changes(old, new)
    words = []
    for verb, before, after in (("added", old, new), ("removed", new, old)):
        if names := [k.removeprefix(TASK) for k in changes if k.startswith(TASK) and k in after and k not in before]:
            words.append(f"tasks {verb}: {', '.join(names)}")
    for key in changes:
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            inner = [f"{k}={was.get(k)!r}, now {now.get(k)!r}" for k in _changes(was, now) if k not in CONTENTS]
            inner += [f"the content of its {k}" for k in _changes(was, now) if k in CONTENTS]
            words.append(f"{key.replace(TASK, 'task ')} changed: {', '.join(inner)}")
        elif not key.startswith(TASK):
            words.append(f"{key}={was!r}, now {now!r}")
    return "; ".join(words)


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [k for k in sorted(old.keys() | new.keys()) if old.get(k, MISSING) != new.get(k, MISSING)]


def _write(
    cfg: Config,
    pool: Pool,
    template: Template,
    folder: Path,
    sources: dict[str, SourceReport],
    read: dict[str, Prompts],
) -> dict[str, Any]:
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
    _require(n_validation, "held-out sequences", "corpus.validation_sequences", tally, sources)
    for task in cfg.eval.tasks:
        tally = tallies[f"tasks/{task.name}"] = Tally()
        prompts = task_prompts(task, corpus.seed, read, pool, taken)
        with RowWriter(folder / "tasks" / f"{task.name}.parquet") as writer:
            for row in prompt_rows(task, prompts, template, filters, tally.skipped):
                writer.add(row)
                tally.row(row)
        of = sources if task.source == "held_out" else {}
        _require(task.prompts, f"{task.name} prompts", f"prompts of eval task {task.name!r}", tally, of)
    # Last, so that the filters know the held-out text and the prompts.
    tally = tallies["train"]
    with (
        RowWriter(folder / "train.parquet") as writer,
        progress_bar("tokenising", wanted or pool.size(held_out=False), "sequences") as bar,
    ):
        for _, row in _encoded(pool.walk(held_out=False), template, filters, corpus, wanted, tally):
            writer.add(row)
            bar.update(1)
    _require(wanted, "training sequences", "corpus.sequences", tally, sources)
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


def _require(wanted: int | None, what: str, key: str, tally: Tally, sources: dict[str, SourceReport]) -> None:
    """ValueError where too few rows were found, with what is known of the `sources` that they come from."""
    found = len(tally.lengths)
    if found == 0 or (wanted is not None and found < wanted):
        skipped = "; ".join(f"{n} {reason}" for reason, n in tally.skipped.items()) or "none"
        read = "".join(f"; {name}: {source.in_words()}" for name, source in sources.items())
        raise ValueError(
            f"only {found} usable {what} of the {wanted or 'at least 1'} that {key} asks for (passed over: {skipped}"
            f"{read}): lower {key}, {'raise corpus.held_out_fraction, ' * ('held-out' in what)}or give more data"
        )
