"""Records of chat data sets to clean conversations: known roles, alternating turns, an assistant's turn at the end."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

Message = dict[str, str]  # {"role": system | user | assistant | tool, "content": text}

ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
ID_KEYS = ("id", "conversation_id", "prompt_id", "sample_id")
PART = re.compile(r"_\d+$")  # ShareGPT cuts long conversations into parts ID_0, ID_1, ...


@dataclass(frozen=True)
class Conversation:
    """`group` is what the split into train and held-out goes by: all parts of one conversation share it.

    A source may be tokenised already: then there are no messages, but ids and their mask.
    """

    sample_id: str
    group: str
    source: str
    messages: list[Message]
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)


class Unusable(Exception):
    """A conversation that is left out; the text is the reason, and is counted in the report."""


def conversation_of(record: dict[str, Any], source: str) -> Conversation:
    """One record as a conversation. Without an id, a hash of the text stands for it.

    Raises:
        Unusable: with the reason.
    """
    if "input_ids" in record:
        found = Conversation("", "", source, [], *_tokens_of(record))
    else:
        found = Conversation("", "", source, clean(turns_of(record)))
    identifier = str(next((record[k] for k in ID_KEYS if record.get(k) not in (None, "")), digest(found)))
    group = str(record.get("split_group") or (PART.sub("", identifier) if "conversations" in record else identifier))
    return replace(found, sample_id=f"{source}/{well_formed(identifier)}", group=f"{source}/{well_formed(group)}")


def _tokens_of(record: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids and loss mask of a tokenised row: `loss_mask`, or `labels` that are -100 where nothing is to be learned."""
    ids, mask, labels = record["input_ids"], record.get("loss_mask"), record.get("labels")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise Unusable("input_ids that are no list of token ids")
    if mask is None and isinstance(labels, list):
        mask = [label != -100 for label in labels]
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
        raise Unusable("input_ids without a loss_mask (0 or 1) or labels of the same length")
    return ids, list(map(int, mask))


def turns_of(record: dict[str, Any]) -> list[tuple[str, Any]]:
    """(role, content) pairs of the shapes that chat data sets come in. A `system` text stands before them."""
    system = [("system", record["system"])] if record.get("system") else []
    for key in ("conversations", "messages", "conversation"):
        if isinstance(turns := record.get(key), list):
            return [*system, *map(_turn, turns)]
    for prompt, response in (("prompt", "response"), ("instruction", "output"), ("question", "answer")):
        if isinstance(record.get(prompt), str) and isinstance(record.get(response), str):
            return [*system, ("user", record[prompt]), ("assistant", record[response])]
    raise Unusable("no conversation in the record")


def _turn(turn: Any) -> tuple[str, Any]:
    if not isinstance(turn, dict):
        raise Unusable("a turn is no object")
    role = turn.get("from", turn.get("role"))
    content = turn.get("value", turn.get("content"))
    return str(role), content


def clean(turns: list[tuple[str, Any]]) -> list[Message]:
    """Messages as the target would see them in a chat.

    Empty turns go; neighbours of one role are joined by a blank line; what an assistant says before any user, and what
    is said after the last assistant, goes too: the first has no prompt, the second is never answered. Text of an
    assistant loses its outer white space, which chat templates trim or which would fuse with the template's own.

    Raises:
        Unusable: an unknown role, content that is no text, or no answered user turn.
    """
    messages: list[Message] = []
    for name, content in turns:
        role = ROLES.get(name.lower())
        if role is None:
            raise Unusable("unknown role")
        text = _text(content)
        if not text.strip():
            continue
        if role == "assistant":
            if not any(m["role"] == "user" for m in messages):
                continue
            text = text.strip()
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n\n" + text
        else:
            messages.append({"role": role, "content": text})
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise Unusable("no answered user turn")
    return messages


def _text(content: Any) -> str:
    """Text of a message; lists of parts are joined."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) else p for p in content]
        texts = [p for p in parts if isinstance(p, str)]
        content = "\n".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise Unusable("content that is no text")
    return well_formed(content)


def well_formed(text: str) -> str:
    """Text as it is, but lone surrogates, which no tokenizer and no file takes, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def digest(conversation: Conversation) -> str:
    """Of what is said, the same on every machine: equal for exact duplicates."""
    said: list[Any] = [*conversation.messages] or [conversation.input_ids, conversation.loss_mask]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]
