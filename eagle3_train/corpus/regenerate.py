"""The step `regenerate`: the target writes the assistant turns of the corpus's conversations (docs/corpus.md).

On-policy data is what a draft head meets when it decodes, and what the EAGLE-3 paper trains on.
"""

from __future__ import annotations

import heapq
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_train.config import Config
from eagle3_train.console import Bar, count, progress_bar, say
from eagle3_train.files import read_json, write_json, write_text
from eagle3_train.target import (
    chat_template_hash,
    load_tokenizer,
    prepare_target,
    stop_ids,
    tokenizer_hash,
    weight_hash,
)

from .messages import Conversation, Message, Unusable
from .order import order_key
from .pool import Pool
from .readers import SourceReport, fingerprint, read_conversations, sources_of
from .template import Template

IDENTITY = "identity.json"
PART = "part-{:05d}.jsonl"  # of one worker: a line a conversation, in the order they were finished

# (name, input ids, new tokens at most) of prompts, and a callback that is told of new tokens -> the new tokens of each.
Asked = tuple[str, np.ndarray, int]
Write = Callable[[list[Asked], Callable[[int], None]], list[list[int]]]


@dataclass
class Dialogue:
    """A conversation as far as the target has written it."""

    source: Conversation
    messages: list[Message] = field(default_factory=list)
    at: int = 0  # messages of the source that are dealt with
    turns: int = 0  # that the target wrote
    ended: str = ""  # why there are no more; empty: all are written

    def next_prompt(self) -> list[Message] | None:
        """What the target answers next: everything up to its next turn. None: nothing is left."""
        while self.at < len(self.source.messages) and self.source.messages[self.at]["role"] != "assistant":
            self.messages.append(self.source.messages[self.at])
            self.at += 1
        return self.messages if self.at < len(self.source.messages) and not self.ended else None

    def answer(self, text: str) -> None:
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        self.at += 1
        self.turns += 1

    def record(self) -> dict[str, Any]:
        """As a line of a source of format `jsonl`; the id and the side of the split stay the source's own."""
        while self.messages and self.messages[-1]["role"] != "assistant":
            self.messages.pop()
        name = f"{self.source.source}/"
        return {
            "id": self.source.sample_id.removeprefix(name),
            "split_group": self.source.group.removeprefix(name),
            "messages": self.messages,
        }


def regenerate(
    cfg: Config, writer: Callable[[], AbstractContextManager[Write]], rank: int = 0, world: int = 1
) -> dict[str, Path]:
    """Write `paths.regenerated`: `<source>.jsonl` a source, once all is done. Returns these files.

    Conversations are taken in the global order, held-out ones among them, so that more of them continue what is there.
    Each is written down when it is finished, and never again: a killed run loses one batch. Worker `rank` of `world`
    takes every world-th; whoever finds all of them done writes the files. `writer` opens the target.

    Raises:
        ValueError: what is there was written by another target, with another sampling or of other sources.
    """
    folder = Path(cfg.paths.regenerated)
    target = prepare_target(cfg.target, cfg.paths.target)
    tokenizer = load_tokenizer(target, cfg.target.chat_template, cfg.target.trust_remote_code)
    template = Template(tokenizer, stop_ids(target, tokenizer), cfg.target.chat_template_args)
    _expect(folder, identity(cfg, target), cfg.dry_run)
    with Pool(folder, cfg.corpus.seed, cfg.corpus.held_out_fraction) as pool:
        for source in sources_of(cfg.corpus):
            for conversation in read_conversations(source, SourceReport()):
                pool.add(conversation)
        pool.mix({source.name: source.weight for source in sources_of(cfg.corpus)})
        left_out: Counter[str] = Counter()  # among the first ones in the order, up to the last that is wanted
        wanted = list(islice(_usable(pool, cfg, template, left_out), cfg.regenerate.conversations))
    done = _done(folder)
    mine = [c for n, c in enumerate(wanted) if n % world == rank and c.sample_id not in done]
    turns = sum(m["role"] == "assistant" for c in mine for m in c.messages)
    if rank == 0:
        replaced = sum(len(template.ids(m["content"])) for c in mine for m in c.messages if m["role"] == "assistant")
        finished = sum(c.sample_id in done for c in wanted)
        say(
            f"regenerate: {count(len(wanted), 'conversation')}, {finished:,} of them done; left {len(mine):,} with "
            f"{count(turns, 'turn')}, whose present text is {count(replaced, 'token')}"
            + "".join(f"\n  left out: {n:,} {reason}" for reason, n in left_out.items())
        )
    if cfg.dry_run:
        return {}
    if mine:
        with writer() as write, progress_bar("regenerating", turns, "turns", show=rank == 0) as bar:
            for start in range(0, len(mine), cfg.regenerate.batch):
                batch = [Dialogue(c) for c in mine[start : start + cfg.regenerate.batch]]
                _write_turns(batch, write, template, cfg, bar)
                _append(folder / PART.format(rank), batch)
    return _assemble(folder, wanted)


def identity(cfg: Config, target: Path) -> dict[str, Any]:
    """All that the text depends on, flat, so that a difference has a name."""
    sampling = {k: v for k, v in asdict(cfg.regenerate).items() if k not in ("conversations", "batch")}
    return {
        **{f"regenerate.{k}": v for k, v in sampling.items()},
        **{f"source {s.name}": asdict(s) | {"path": fingerprint(s)} for s in sources_of(cfg.corpus)},
        "corpus.seed": cfg.corpus.seed,
        "corpus.max_length": cfg.corpus.max_length,
        "target.weights": weight_hash(target),
        "target.tokenizer": tokenizer_hash(target),
        "target.chat_template": chat_template_hash(target, cfg.target.chat_template),
        "target.chat_template_args": cfg.target.chat_template_args,
    }


def _expect(folder: Path, wanted: dict[str, Any], dry_run: bool) -> None:
    path = folder / IDENTITY
    if path.is_file():
        found = read_json(path)
        if changed := [k for k in sorted(found.keys() | wanted.keys()) if found.get(k) != wanted.get(k)]:
            raise ValueError(
                f"{folder} holds text that was regenerated with other values of {', '.join(changed)}: give another "
                f"folder (paths.regenerated=FOLDER), or remove it: rm -r {folder}"
            )
    elif not dry_run:
        write_json(path, wanted)


def _usable(pool: Pool, cfg: Config, template: Template, left_out: Counter[str]) -> Iterator[Conversation]:
    """Conversations in the global order whose first turn the target can be asked for."""

    def key(conversation: Conversation) -> bytes:
        return order_key(cfg.corpus.seed, conversation.sample_id)

    for conversation in heapq.merge(pool.walk(held_out=False), pool.walk(held_out=True), key=key):
        try:
            if not conversation.messages:
                raise Unusable("tokenised already")
            if any(m["role"] == "tool" for m in conversation.messages):
                raise Unusable("with a tool's answers, which another question would not have got")
            if len(template.prompt_ids(Dialogue(conversation).next_prompt() or [])) >= cfg.corpus.max_length:
                raise Unusable(f"with a first prompt of corpus.max_length={cfg.corpus.max_length} tokens or more")
        except Unusable as e:
            left_out[str(e)] += 1
            continue
        yield conversation


def _write_turns(batch: list[Dialogue], write: Write, template: Template, cfg: Config, bar: Bar) -> None:
    """All turns of a batch, one of each conversation at a time: it sees the earlier ones as the target wrote them."""
    tokens = 0

    def progress(n: int) -> None:
        nonlocal tokens
        tokens += n
        bar.update(0, note=f"{tokens:,} tokens of this batch")

    expected = bar.units + sum(m["role"] == "assistant" for d in batch for m in d.source.messages)
    while asked := [(d, prompt) for d in batch if (prompt := _prompt(d, template, cfg)) is not None]:
        answers = write([prompt for _, prompt in asked], progress)
        for (dialogue, _), new in zip(asked, answers, strict=True):
            finished = bool(new) and new[-1] in template.ends
            # Without the outer white space, which `prepare` would take away: what comes next must see what it will see.
            text = str(template.tokenizer.decode(new[:-1] if finished else new)).strip()
            if text:
                dialogue.answer(text)
            if not text or not finished:
                dialogue.ended = "cut off" if text else "empty"
        bar.update(len(asked))
    bar.update(expected - bar.units)  # turns that will not come: the conversation ended early


def _prompt(dialogue: Dialogue, template: Template, cfg: Config) -> Asked | None:
    messages = dialogue.next_prompt()
    if messages is None:
        return None
    try:
        ids = template.prompt_ids(messages)
    except Unusable as e:  # the target wrote what spells a special token
        dialogue.ended = str(e)
        return None
    room = min(cfg.corpus.max_length - len(ids), cfg.regenerate.max_new_tokens or cfg.corpus.max_length)
    if room < 1:
        dialogue.ended = "full"
        return None
    return f"{dialogue.source.sample_id}/{dialogue.turns}", ids, room


def _append(part: Path, batch: list[Dialogue]) -> None:
    """One write, then fsync; a line that a kill cut short is taken away before the next."""
    lines = "".join(
        json.dumps({"sample_id": d.source.sample_id, "record": d.record()}, ensure_ascii=False) + "\n" for d in batch
    ).encode()
    with open(part, "a+b") as f:
        f.seek(0)
        f.truncate(_whole(f.read()))
        f.seek(0, 2)
        f.write(lines)
        f.flush()
        os.fsync(f.fileno())


def _whole(data: bytes) -> int:
    """Bytes of whole lines."""
    return data.rfind(b"\n") + 1


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for part in sorted(folder.glob("part-*.jsonl")):
        data = part.read_bytes()
        yield from map(json.loads, data[: _whole(data)].splitlines())


def _done(folder: Path) -> set[str]:
    return {line["sample_id"] for line in _lines(folder)}


def _assemble(folder: Path, wanted: list[Conversation]) -> dict[str, Path]:
    """The files of a finished regeneration, in the global order; nothing while conversations are missing."""
    records = {line["sample_id"]: line["record"] for line in _lines(folder)}
    if any(c.sample_id not in records for c in wanted):
        return {}
    files: dict[str, Path] = {}
    for source in dict.fromkeys(c.source for c in wanted):
        kept = [records[c.sample_id] for c in wanted if c.source == source and records[c.sample_id]["messages"]]
        files[source] = folder / f"{source.replace('/', '_')}.jsonl"
        write_text(files[source], "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept))
        say(f"regenerate: {files[source]}: {count(len(kept), 'conversation')}")
    sources = ", ".join(f"{{name: {name}, format: jsonl, path: {path}}}" for name, path in files.items())
    say(f"regenerate: as a corpus: eagle3 prepare corpus.path=null corpus.sources='[{sources}]'")
    return files
