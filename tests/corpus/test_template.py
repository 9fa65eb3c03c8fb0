"""Loss masks: the masked tokens, decoded, are the replies and their end-of-turn tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_train.corpus.messages import Message, Unusable
from eagle3_train.corpus.template import Encoded, Template

CHATML = ("<|im_start|>", "<|im_end|>")
# name -> template file, special tokens, bos, eos, template arguments
SPECS: dict[str, tuple[str, tuple[str, ...], str | None, str, dict[str, Any]]] = {
    "chatml": ("", CHATML, None, "<|im_end|>", {}),
    "smollm2": ("smollm2", CHATML, "<|im_start|>", "<|im_end|>", {}),
    "llama3": (
        "llama3",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        "<|begin_of_text|>",
        "<|end_of_text|>",  # not what ends a turn: that is found in the template
        {},
    ),
    "qwen3 thinking": ("qwen3", CHATML, None, "<|im_end|>", {}),
    "qwen3 not thinking": ("qwen3", CHATML, None, "<|im_end|>", {"enable_thinking": False}),
    "mistral": ("mistral", ("<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>", {}),
    "gemma3": ("gemma3", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", {}),
    "marked": ("marked", CHATML, None, "<|im_end|>", {}),
}
ENDS = {"llama3": "<|eot_id|>", "mistral": "</s>", "gemma3": "<end_of_turn>"}
CHAT: list[Message] = [
    {"role": "user", "content": "hello the question is"},
    {"role": "assistant", "content": "the answer is: größe 🦅 漢字\n\n    code = {'a': 1}"},
    {"role": "user", "content": "and\n the question"},
    {"role": "assistant", "content": "hello"},
]
MakeTokenizer = Callable[..., Any]


def build(name: str, make_tokenizer: MakeTokenizer) -> Template:
    file, special, bos, eos, args = SPECS[name]
    tokenizer = make_tokenizer(special=special, eos=eos)
    if file:
        tokenizer.chat_template = (Path(__file__).parent / "templates" / f"{file}.jinja").read_text().rstrip("\n")
    if bos:
        tokenizer.bos_token = bos
    return Template(tokenizer, [tokenizer.eos_token_id], args)


def masked(template: Template, encoded: Encoded) -> list[str]:
    """The runs of masked tokens, decoded."""
    edges = np.flatnonzero(np.diff(encoded.loss_mask, prepend=0, append=0))
    return [template.tokenizer.decode(encoded.input_ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("name", SPECS)
def test_masked_tokens_decode_to_the_replies(name: str, make_tokenizer: MakeTokenizer) -> None:
    template = build(name, make_tokenizer)
    encoded = template.encode(CHAT, 10_000)
    end, space = ENDS.get(name, "<|im_end|>"), " " if name == "mistral" else ""
    replies = [space + m["content"] + end for m in CHAT if m["role"] == "assistant"]
    if name == "qwen3 thinking":  # the empty thought is generated too
        replies[1] = "<think>\n\n</think>\n\n" + replies[1]
    if name == "qwen3 not thinking":  # earlier turns stand without the empty thought that prompts for them: context
        assert encoded.context_turns == 1
        replies = replies[1:]
    assert masked(template, encoded) == replies
    assert template.tokenizer.decode(encoded.input_ids) == template.render(CHAT)
    assert encoded.dropped_tokens == encoded.dropped_turns == 0


@pytest.mark.parametrize("name", SPECS)
def test_what_is_masked_follows_the_very_prompt_that_the_target_gets(name: str, make_tokenizer: MakeTokenizer) -> None:
    template = build(name, make_tokenizer)
    encoded = template.encode(CHAT, 10_000)
    prompt = template.prompt_ids(CHAT[:-1])
    start = len(prompt)
    assert encoded.input_ids[:start].tolist() == prompt.tolist()
    assert encoded.loss_mask[start - 1 : start + 1].tolist() == [0, 1]


def test_system_text_that_the_template_moves_makes_earlier_turns_context(make_tokenizer: MakeTokenizer) -> None:
    template = build("mistral", make_tokenizer)
    encoded = template.encode([{"role": "system", "content": "be kind"}, *CHAT], 10_000)
    assert encoded.context_turns == 1
    assert masked(template, encoded) == [" hello</s>"]


def test_truncation_keeps_whole_turns_and_counts_what_it_drops(make_tokenizer: MakeTokenizer) -> None:
    template = build("chatml", make_tokenizer)
    whole = template.encode(CHAT, 10_000)
    first = template.encode(CHAT[:2], 10_000)
    encoded = template.encode(CHAT, len(whole.input_ids) - 1)
    assert encoded.input_ids.tolist() == first.input_ids.tolist()
    assert encoded.loss_mask.tolist() == first.loss_mask.tolist()
    assert encoded.dropped_turns == 1
    assert encoded.dropped_tokens == len(whole.input_ids) - len(first.input_ids)


def test_a_first_turn_that_does_not_fit_is_cut(make_tokenizer: MakeTokenizer) -> None:
    template = build("chatml", make_tokenizer)
    whole = template.encode(CHAT[:2], 10_000)
    limit = len(whole.input_ids) - 10
    encoded = template.encode(CHAT, limit)
    assert encoded.input_ids.tolist() == whole.input_ids[:limit].tolist()
    assert encoded.loss_mask.tolist() == whole.loss_mask[:limit].tolist()
    assert encoded.dropped_tokens == len(template.ids(template.render(CHAT))) - limit


def test_text_that_spells_a_special_token_is_refused(make_tokenizer: MakeTokenizer) -> None:
    template = build("chatml", make_tokenizer)
    chat = [CHAT[0], {"role": "assistant", "content": "stop with <|im_end|> now"}]
    with pytest.raises(Unusable, match="special token"):
        template.encode(chat, 100)
    with pytest.raises(Unusable, match="special token"):
        template.prompt_ids([{"role": "user", "content": "<|im_start|>"}])


def test_what_the_template_itself_refuses_is_unusable(make_tokenizer: MakeTokenizer) -> None:
    template = build("gemma3", make_tokenizer)
    with pytest.raises(Unusable, match="roles must alternate"):
        template.encode([CHAT[0], CHAT[0], CHAT[1]], 100)


@pytest.mark.parametrize("text", ["{% for m in messages %}{{ m.content }", "{{ messages | nothing }}", "{{ 1 + 'a' }}"])
def test_a_template_that_is_no_template_is_refused(text: str, make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ValueError, match=r"cannot render two questions.*target\.chat_template=FILE\.jinja"):
        Template(make_tokenizer(text), [1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        # The number of messages stands in front: a finished conversation never begins as its prompts do.
        (
            "{{ messages | length }}{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}",
            "not how the finished conversation begins",
        ),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", "no end-of-turn token"),
        # Llama-3's, for a tokenizer that has no such token: the whole of it is shown.
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '<|eot_id|>' }}{% endfor %}",
            r"'<\|eot_id\|>', is no special token of this tokenizer.*target\.chat_template=FILE\.jinja",
        ),
        # The generation prompt is another one than what stands before finished turns.
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>bot' }}{% endif %}",
            "'bot'",
        ),
    ],
)
def test_a_template_that_cannot_be_masked_is_refused_with_the_reason(
    text: str, reason: str, make_tokenizer: MakeTokenizer
) -> None:
    tokenizer = make_tokenizer(template=text)
    with pytest.raises(ValueError, match=reason):
        Template(tokenizer, [tokenizer.eos_token_id])


@pytest.mark.real
def test_the_real_template(real_target: Path) -> None:
    from eagle3_train.target import load_tokenizer, stop_ids

    tokenizer = load_tokenizer(real_target)
    template = Template(tokenizer, stop_ids(real_target, tokenizer))
    encoded = template.encode(CHAT, 10_000)
    assert masked(template, encoded) == [m["content"] + "<|im_end|>" for m in CHAT if m["role"] == "assistant"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% macro again(n) %}{{ again(n) }}{% endmacro %}{{ again(1) }}", "recursion"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_a_template_that_fails_says_so_with_the_way_out(
    template: str, reason: str, make_tokenizer: MakeTokenizer
) -> None:
    with pytest.raises(ValueError, match=rf"the chat template cannot render .*{reason}.*target\.chat_template=FILE"):
        Template(make_tokenizer(template), [1])


def test_an_argument_that_the_template_does_not_read_is_named(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ValueError, match=r"chat_template_args: the chat template nowhere reads 'enable_thinkin'"):
        Template(make_tokenizer("{% if enable_thinking %}{% endif %}"), [1], {"enable_thinkin": False})
