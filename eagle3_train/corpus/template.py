"""Conversations to token ids and loss masks through the target's own chat template.

The loss mask covers exactly what the target would generate: an assistant's text and its end-of-turn token. Two ways:

- a template with `{% generation %}` markers says itself what is generated;
- any other is rendered incrementally: the prompt of a turn is the conversation up to it with the generation prompt.
  Where the prompt's token ids are a prefix of the conversation's, the turn is what follows, its end-of-turn token
  included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .messages import Message, Unusable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKER = re.compile(r"\{%-?\s*generation\b")
PROBE: list[Message] = [
    {"role": "user", "content": "First question?"},
    {"role": "assistant", "content": "First answer."},
    {"role": "user", "content": "Second question?"},
    {"role": "assistant", "content": "Second answer."},
]


@dataclass(frozen=True, eq=False)
class Encoded:
    input_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] uint8
    dropped_tokens: int  # by truncation
    dropped_turns: int  # assistant turns that truncation dropped whole
    context_turns: int  # assistant turns that the template renders otherwise than it prompts for them: not supervised


class Template:
    """A tokenizer and its chat template. `ends`: the token ids that end a turn of the target.

    Raises:
        ValueError: the template cannot be masked exactly, with the reason, or does not know one of `args`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: list[int], args: dict[str, Any] | None = None) -> None:
        self.tokenizer, self.args = tokenizer, dict(args or {})
        source = str(tokenizer.chat_template)
        if unknown := [name for name in self.args if not re.search(rf"\b{re.escape(name)}\b", source)]:
            raise ValueError(f"target.chat_template_args: the chat template nowhere reads {unknown[0]!r}: leave it out")
        self.marked = MARKER.search(source) is not None
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special} | {
            *tokenizer.all_special_tokens
        }
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._special_ids = {tokenizer.convert_tokens_to_ids(t) for t in special}
        self.ends = set(ends)
        self._probe()

    def cut(self, ids: list[int], mask: list[int], max_length: int) -> Encoded:
        """A row that was tokenised elsewhere, at most `max_length` tokens of it."""
        row = np.array(ids[:max_length], np.int32), np.array(mask[:max_length], np.uint8)
        return Encoded(*row, dropped_tokens=len(ids) - len(row[0]), dropped_turns=0, context_turns=0)

    def render(self, messages: list[Message], prompt: bool = False) -> str:
        """The conversation as text; `prompt`: with the generation prompt at its end."""
        return cast(
            str, self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **self.args)
        )

    def ids(self, text: str) -> list[int]:
        # The template writes the special tokens, the first one too; `verbose`: length is our business, not a warning's.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def prompt_ids(self, messages: list[Message]) -> np.ndarray:
        """Token ids [T] int32 of a prompt: the conversation and the generation prompt.

        Raises:
            Unusable: with the reason.
        """
        self._refuse_special(messages)
        return np.array(self.ids(self._rendered(messages, prompt=True)), np.int32)

    def encode(self, messages: list[Message], max_length: int) -> Encoded:
        """A conversation that ends with an assistant's turn, at most `max_length` tokens of it.

        A longer one loses whole turns at its end, such that an assistant's turn remains the last; where not even the
        first fits, its text is cut.

        Raises:
            Unusable: with the reason.
        """
        self._refuse_special(messages)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        ids, kept = self._fit(messages, turns, max_length)
        total = len(ids) if kept == len(turns) else len(self.ids(self._rendered(messages)))
        dropped = len(turns) - max(kept, 1)
        turns = turns[: len(turns) - dropped]
        messages = messages[: turns[-1] + 1]
        mask, context = self._marked(messages, ids) if self.marked else self._incremental(messages, turns, ids)
        return Encoded(
            np.array(ids[:max_length], np.int32),
            mask[:max_length],
            dropped_tokens=total - min(len(ids), max_length),
            dropped_turns=dropped,
            context_turns=context,
        )

    def _fit(self, messages: list[Message], turns: list[int], max_length: int) -> tuple[list[int], int]:
        """Token ids of the longest run of whole turns that fits, and how many; of the first, and 0, if none fits."""
        best: list[int] = []
        for kept, last in enumerate(turns):
            ids = self.ids(self._rendered(messages[: last + 1]))
            if len(ids) > max_length:
                return (best, kept) if kept else (ids, 0)
            best = ids
        return best, len(turns)

    def _incremental(self, messages: list[Message], turns: list[int], ids: list[int]) -> tuple[np.ndarray, int]:
        mask, context = np.zeros(len(ids), np.uint8), 0
        for turn in turns:
            prompt = self.ids(self._rendered(messages[:turn], prompt=True))
            start = len(prompt)
            if ids[:start] != prompt:
                context += 1
                continue
            end = next((i for i in range(start, len(ids)) if ids[i] in self.ends), None)
            if end is None:
                raise Unusable("an assistant's turn without an end-of-turn token")
            mask[start : end + 1] = 1
        return mask, context

    def _marked(self, messages: list[Message], ids: list[int]) -> tuple[np.ndarray, int]:
        encoded: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **self.args
        )
        mask = np.array(encoded["assistant_masks"], np.uint8)
        assert encoded["input_ids"] == ids
        # Some templates close the marker before the end-of-turn token, which the target generates all the same.
        for i in np.flatnonzero(np.diff(mask.astype(np.int8)) == -1) + 1:
            mask[i] = ids[i] in self.ends
        return mask, 0

    def _rendered(self, messages: list[Message], prompt: bool = False) -> str:
        try:
            return self.render(messages, prompt)
        except Exception as e:  # the template is a program of its own, which may raise anything
            raise Unusable(f"the chat template refuses it: {' '.join(str(e).split())}") from e

    def _refuse_special(self, messages: list[Message]) -> None:
        if any(self._special.search(m["content"]) for m in messages):
            raise Unusable("text that spells a special token")

    def _probe(self) -> None:
        """Find the template's end-of-turn token, and refuse a template whose turns cannot be told apart exactly."""
        try:
            text, prompt = self._rendered(PROBE), self._rendered(PROBE[:-1], prompt=True)
        except Unusable as e:
            raise ValueError(
                f"the chat template cannot render two questions with their answers ({e}): correct it, or give another: "
                "target.chat_template=FILE.jinja"
            ) from e
        ids, prompt_ids = self.ids(text), self.ids(prompt)
        reply = PROBE[-1]["content"]
        behind = text[text.rindex(reply) + len(reply) :] if reply in text else ""
        tail = self.ids(behind)
        end = next((i for i in tail if i in self._special_ids or i in self.ends), None)
        if end is None:
            raise ValueError(
                f"the chat template writes no end-of-turn token behind an assistant's turn: what it writes there, "
                f"{behind!r}, is no special token of this tokenizer, but {self.tokenizer.convert_ids_to_tokens(tail)}. "
                "Give the template that belongs to the tokenizer: target.chat_template=FILE.jinja"
            )
        self.ends.add(end)
        if self.marked:
            return
        if ids[: len(prompt_ids)] != prompt_ids:
            n = next(
                (i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), min(len(text), len(prompt))
            )
            raise ValueError(
                "the chat template cannot be masked: a turn's prompt is not how the finished conversation begins "
                f"({prompt[n : n + 40]!r} in the prompt, {text[n : n + 40]!r} in the conversation, at character {n}). "
                "Give a template with {% generation %} markers: target.chat_template=FILE.jinja"
            )
        mask, _ = self._incremental(PROBE, [len(PROBE) - 1], ids)
        if reply not in (said := self.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])):
            raise ValueError(f"the chat template cannot be masked: the turn {reply!r} is masked as {said!r}")
