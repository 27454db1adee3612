"""What a fake vLLM is told to say, and the tokens it is made of.

The invariant: only the tokens are made up: one per word, the same word always with the same id.
"""

from __future__ import annotations

import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

EOS = 2
VOCABULARY = 32_000
GREETING = "hello from the fake policy"
PIECES = re.compile(r"\s*\S+|\s+")
_WORDS: dict[int, str] = {}
"""The word of each id that was made up in this process: a made-up tokenizer has no vocabulary file."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a reply; `arguments` is JSON text."""

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True)
class Reply:
    """What one request is answered with. Ids and logprobs are made from the text unless given; times are in seconds.

    `reasoning` comes before the text, as where vLLM has a reasoning parser, and tool calls after it; without a text there is
    none before tool calls, and a greeting else. `delay` passes before the first token,
    `token_delay` between tokens. `status` other than 200 answers with vLLM's error object. `die_after` tokens the connection
    is cut (0: before anything is sent), `error_after` tokens a stream ends with vLLM's error event. `raw` replaces the whole
    body. `chunk_bytes` cuts a stream's bytes at odd places.
    """

    text: str = None  # type: ignore[assignment]  # `__post_init__` sets it
    tool_calls: Sequence[ToolCall] = ()
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    finish_reason: str = ""
    delay: float = 0.0
    token_delay: float = 0.0
    status: int = 200
    message: str = "scripted failure"
    die_after: int | None = None
    error_after: int | None = None
    raw: bytes | None = None
    chunk_bytes: int = 0
    reasoning: str = ""

    def __post_init__(self) -> None:
        if self.text is None:
            object.__setattr__(self, "text", "" if self.tool_calls else GREETING)

    @property
    def ending(self) -> str:
        """The finish reason, by default what the content implies."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")


@dataclass(frozen=True)
class Recorded:
    """A request as it arrived. `headers` have lower-case names; `at` is Unix time."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    at: float

    @property
    def request_id(self) -> str:
        """What the client sent as `X-Request-Id`."""
        return self.headers.get("x-request-id", "")


@dataclass
class ReplyToken:
    """One token of a reply: its id, its text, its logprob."""

    id: int
    text: str
    logprob: float


@dataclass
class Generation:
    """One choice being sampled. `sampled` is how many tokens the engine has produced, `done` that it has ended. `calls` are the
    reply's tool calls, each with an id that no other has, as vLLM gives them where a model writes none."""

    index: int
    reply: Reply
    tokens: list[ReplyToken]
    sampled: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        self.calls = [
            replace(call, id=call.id or f"chatcmpl-tool-{uuid.uuid4().hex[:16]}") for call in self.reply.tool_calls
        ]


@dataclass(eq=False)
class Job:
    """A request in the fake engine. `packs` says that logprobs can be packed."""

    request: Recorded
    generations: list[Generation]
    prompts: list[list[int]]
    id: str
    created: int
    packs: bool = True

    @property
    def n(self) -> int:
        """How many choices it has."""
        return len(self.generations)

    def key(self, index: int) -> str:
        """How a policy server names this choice in `Update.in_flight` (one prompt, or one choice for each)."""
        request_id = self.request.request_id
        several = self.n > 1 if len(self.prompts) == 1 else index > 0
        return f"{index}_{request_id}" if several else request_id


def tokenize(text: str) -> list[int]:
    """Made-up ids, one per word: the same word has the same id everywhere."""
    pieces = PIECES.findall(text)
    ids = [3 + zlib.crc32(piece.encode()) % (VOCABULARY - 3) for piece in pieces]
    _WORDS.update(zip(ids, pieces, strict=True))
    return ids


def detokenize(ids: Sequence[int]) -> str:
    """The text of made-up ids, as far as this process has made them."""
    return "".join(_WORDS.get(item, "") for item in ids)


def tokenize_reply(reply: Reply, index: int) -> list[ReplyToken]:
    """The tokens a reply is made of, end-of-sequence included when it stopped by itself."""
    texts = (reply.reasoning, reply.text, tool_text(reply))
    pieces = [piece for text in texts for piece in PIECES.findall(text)] or [""]
    ids = [number for text in texts for number in tokenize(text)] or [3]
    if reply.token_ids is not None:
        ids = list(reply.token_ids)
        pieces = [*pieces[: len(ids)], *[""] * (len(ids) - len(pieces))]
    elif reply.ending in {"stop", "tool_calls"}:
        ids, pieces = [*ids, EOS], [*pieces, ""]
    values = reply.logprobs or [-((token * 37 + index * 11 + 5) % 100) / 50 - 0.01 for token in ids]
    return [ReplyToken(*item) for item in zip(ids, pieces, values, strict=True)]


def tool_text(reply: Reply) -> str:
    """Tool calls as hermes models write them."""
    calls = (
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in reply.tool_calls
    )
    return "\n".join(calls)
