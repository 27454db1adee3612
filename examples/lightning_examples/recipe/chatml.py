"""Conversations as tokens: a small byte-level tokenizer with ChatML and hermes tool calls.

The invariant: `encode` renders with the very template that is shipped in the model's folder, so what a model was taught and
what a policy server shows it are the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TypeAlias

from lightning.types import Json
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Message: TypeAlias = Mapping[str, Json]

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

PIECES = r"\d{1,2}| ?[^\s\d]+|\s"
"""Numbers in pieces of two digits, words with the space before them, every other space by itself: pieces long enough for
short prompts and regular enough for a tiny model to copy them."""

VOCABULARY = 768
"""Tokens, at most: with hidden states of 64 numbers, a model of less than a megabyte."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One demonstration: OpenAI chat messages and the tools that were offered."""

    messages: Sequence[Message]
    tools: Sequence[Message] = field(default=())


@dataclass(frozen=True, slots=True)
class Row:
    """`ids` of a whole conversation; `trained[i]` says that the assistant wrote token i (its end mark included)."""

    ids: list[int]
    trained: list[bool]


def tool_call(call_id: str, name: str, arguments: Mapping[str, Json]) -> Message:
    """An assistant message that calls one tool, as the OpenAI API would return it."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def chat_template() -> str:
    """The Jinja template that goes into the model's folder."""
    return resources.files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8").removesuffix("\n")


def build_tokenizer(
    texts: Iterable[str], vocab_size: int = VOCABULARY, pieces: str = PIECES
) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on `texts` (rendered conversations); at most `vocab_size` tokens, any text can be encoded.

    `pieces` is a regular expression: text is first cut into its matches, and no token ever crosses a cut.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TOOL_MARKS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Not special: a policy server's tool-call parser must see them in the decoded text.
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TOOL_MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=chat_template(),
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def render(conversation: Conversation) -> str:
    """The conversation as the text a tokenizer is trained on."""
    # The template needs some tokenizer to be rendered by; an empty one knows it as well as a trained one.
    return str(_render(_untrained(), conversation))


def encode(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Row:
    """Tokenize a conversation and mark what the assistant wrote."""
    ids = [int(i) for i in tokenizer.encode(_render(tokenizer, conversation), add_special_tokens=False)]
    header = tokenizer.encode(f"{START}assistant\n", add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END)
    trained = [False] * len(ids)
    position = 0
    while position < len(ids):
        if ids[position : position + len(header)] != header:
            position += 1
            continue
        position += len(header)
        stop = ids.index(end, position) + 1
        trained[position:stop] = [True] * (stop - position)
        position = stop
    return Row(ids, trained)


def _render(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> str:
    tools = list(conversation.tools) or None
    return str(tokenizer.apply_chat_template(list(conversation.messages), tools=tools, tokenize=False))


def _untrained() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=chat_template())
