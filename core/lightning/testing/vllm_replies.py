"""Makes what vLLM 0.31's OpenAI server sends for a scripted reply, byte by byte: answers, chunks, ids, logprobs and nulls. Also
refuses with a 400 what vLLM's chat route refuses, so that the fake is as strict as the real server.

The invariant: only the tokens are made up: one per word, the same word always with the same id. Fields are present, absent or
null exactly as in vLLM (whole answers are dumped with nulls, chunks without fields that were not set). What is refused here
vLLM refuses as well; a test asks its own request class and renderer. The fake's model takes pictures, sound and video.
"""

from __future__ import annotations

import json
import math
import re
import uuid
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.policy_server.packed_logprobs import FIELD, HEADER, IDS_HEADER, LOWEST, WANTED, pack, pack_ids

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
    """The scripted answer to one request. Ids and logprobs are made from the text unless given; times are in seconds.

    `reasoning` comes before the text, as where vLLM has a reasoning parser, and tool calls after it. The default text is empty
    before tool calls, else a greeting. `delay` passes before the first token, `token_delay` between tokens. `status` other than
    200 answers with vLLM's error object. After `die_after` tokens the connection is cut (0: before anything is sent), after
    `error_after` tokens a stream ends with vLLM's error event. `raw` replaces the whole body. `chunk_bytes` cuts a stream's
    bytes at odd places.
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
        """The client's `X-Request-Id`; "" without one."""
        return self.headers.get("x-request-id", "")


@dataclass
class ReplyToken:
    """One token of a reply: its id, its text, its logprob."""

    id: int
    text: str
    logprob: float


@dataclass
class Generation:
    """One choice being sampled. `sampled` is how many tokens the engine has produced; `done` says that it has ended. `calls`
    are the reply's tool calls, each with a unique id, as vLLM gives them where a model writes none."""

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
    """A request in the fake engine. `packs` says whether logprobs can be packed."""

    request: Recorded
    generations: list[Generation]
    prompts: list[list[int]]
    id: str
    created: int
    packs: bool = True

    @property
    def n(self) -> int:
        """The number of choices."""
        return len(self.generations)

    def key(self, index: int) -> str:
        """Return the name of this choice in a policy server's `Update.in_flight` (for one prompt, or one choice for each
        prompt)."""
        request_id = self.request.request_id
        several = self.n > 1 if len(self.prompts) == 1 else index > 0
        return f"{index}_{request_id}" if several else request_id


def tokenize(text: str) -> list[int]:
    """Return made-up ids, one per word: the same word has the same id everywhere."""
    pieces = PIECES.findall(text)
    ids = [3 + zlib.crc32(piece.encode()) % (VOCABULARY - 3) for piece in pieces]
    _WORDS.update(zip(ids, pieces, strict=True))
    return ids


def detokenize(ids: Sequence[int]) -> str:
    """Return the text of made-up ids; ids that this process has not made are left out."""
    return "".join(_WORDS.get(item, "") for item in ids)


def tokenize_reply(reply: Reply, index: int) -> list[ReplyToken]:
    """Return the tokens of a reply, with end-of-sequence when it stopped by itself."""
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
    """Return the tool calls of a reply as hermes models write them."""
    calls = (
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in reply.tool_calls
    )
    return "\n".join(calls)


Refusal = tuple[str, str]
"""The message of a refusal, and the field that it is about."""

NO_TEXT = "TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]"
"""The message of tokenizers for a text with a lone surrogate, which vLLM passes on."""
SYSTEM_NOT_FIRST: Refusal = ("System message must be at the beginning.", "messages")
"""The message of a chat template such as Qwen3.5's, which vLLM passes on."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
UNTRUSTED = (
    "Chat template is passed with request, but --trust-request-chat-template is not set. "
    "Refused request with untrusted chat template."
)
RANGES = {
    "temperature": (0.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "min_p": (0.0, 1.0),
}
"""Fields that are numbers, with the smallest and the largest accepted value."""


def refusal(body: Mapping[str, Any]) -> Refusal | None:
    """Return why vLLM refuses a chat request; None if it accepts it."""
    return next(_all(body), None)


def cannot_be_tokenized(body: Mapping[str, Any]) -> bool:
    """Whether part of the prompt is no valid text: it has half of a character (a lone surrogate)."""
    try:
        json.dumps([body.get(name) for name in ("messages", "tools", "prompt")], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _all(body: Mapping[str, Any]) -> Iterator[Refusal]:
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        yield "messages must be a list that is not empty", "messages"
        return
    yield from _template(body)
    yield from _numbers(body)
    yield from _tools(body)
    yield from _formats(body)
    for message in body["messages"]:
        yield from _message(message)


def _template(body: Mapping[str, Any]) -> Iterator[Refusal]:
    for name, holder in (("chat_template", body), ("chat_template_kwargs", body.get("chat_template_kwargs") or {})):
        if holder.get("chat_template") is not None:
            yield UNTRUSTED, name


def _numbers(body: Mapping[str, Any]) -> Iterator[Refusal]:
    for name, (least, most) in RANGES.items():
        value = body.get(name)
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            yield f"{name} must be in [{least:g}, {most:g}], got {value}.", name
    top_p = body.get("top_p")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        yield f"top_p must be in (0, 1], got {top_p}.", "top_p"
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None and body[name] < 1:
            yield f"max_tokens must be at least 1, got {body[name]}.", name
    if body.get("stream_options") and not body.get("stream"):
        yield "Stream options can only be defined when `stream=True`.", "stream_options"
    if body.get("top_logprobs") and not body.get("logprobs"):
        yield "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs"
    stops = body.get("stop") or []
    if any(not text for text in ([stops] if isinstance(stops, str) else stops)):
        yield "stop cannot contain an empty string.", "stop"
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        yield f"Input should be one of {EFFORTS}, got {effort!r}", "reasoning_effort"


def _tools(body: Mapping[str, Any]) -> Iterator[Refusal]:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools == []:
        yield (
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            "tools",
        )
    names = []
    for tool in tools or ():
        if tool.get("type", "function") != "function" or not isinstance(tool.get("function", {}).get("name"), str):
            yield f"Input should be a function with a name, got {tool.get('type')!r}", "tools"
        else:
            names.append(tool["function"]["name"])
    if choice in (None, "none"):
        return
    if tools is None:
        yield "When using `tool_choice`, `tools` must be set.", "tool_choice"
    elif isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        if name not in names:
            yield "The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice"
    elif choice not in ("auto", "required"):
        yield (
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.',
            "tool_choice",
        )


def _formats(body: Mapping[str, Any]) -> Iterator[Refusal]:
    wanted = body.get("response_format") or {}
    kind = wanted.get("type", "text")
    if kind not in FORMATS:
        yield f"Input should be one of {FORMATS}, got {kind!r}", "response_format"
    elif kind == "json_schema" and wanted.get("json_schema") is None:
        yield "When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format"


def _message(message: Mapping[str, Any]) -> Iterator[Refusal]:
    if not isinstance(message.get("role"), str):
        yield "Field required: role", "messages"
    if message.get("role") != "assistant":
        return
    for call in message.get("tool_calls") or ():  # malformed arguments are taken for {}
        if not isinstance(call, Mapping):
            yield "assistant tool_calls entries must be objects.", "tool_calls"
        elif call.get("type", "function") != "function" or not isinstance(call.get("function"), Mapping):
            yield "chat completions only support assistant tool_calls of type 'function'.", "tool_calls"


class Shape(ABC):
    """The parts that differ between the routes for chat and completions."""

    prefix = ""

    def most_tokens(self, body: Mapping[str, Any]) -> tuple[str, int]:
        """Return the name of the token limit, and its value; 0 where a request gives none."""
        return "max_tokens", body.get("max_tokens", 16) or 0

    @abstractmethod
    def prompts(self, body: Mapping[str, Any]) -> list[list[int]]:
        """Return the token ids of every prompt in a request."""

    @abstractmethod
    def whole(self, job: Job, model: str) -> dict[str, Any]:
        """Return a whole answer, nulls included (vLLM dumps its model with them)."""

    @abstractmethod
    def opening(self, job: Job, model: str) -> list[dict[str, Any]]:
        """Return the chunks before the first token."""

    @abstractmethod
    def chunks(self, job: Job, generation: Generation, token: ReplyToken, model: str) -> list[dict[str, Any]]:
        """Return the chunks for one token (vLLM dumps these without fields that were not set)."""

    def usage_chunk(self, job: Job, model: str) -> dict[str, Any]:
        """Return the last chunk when usage was asked for."""
        return {**self.frame(job, model), "choices": [], "usage": usage(job)}

    @abstractmethod
    def frame(self, job: Job, model: str) -> dict[str, Any]:
        """Return the fields that every chunk has."""


class ChatShape(Shape):
    """`/v1/chat/completions` with a hermes-like tool parser."""

    prefix = "chatcmpl-"

    def __init__(self, shows_tools: bool = True, skips_thinking: bool = False) -> None:
        self._shows_tools, self._skips_thinking = shows_tools, skips_thinking

    def most_tokens(self, body: Mapping[str, Any]) -> tuple[str, int]:
        """Return the name of the token limit, newer or older, and its value; 0 if neither is set."""
        name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        return name, body.get(name) or 0

    def prompts(self, body: Mapping[str, Any]) -> list[list[int]]:
        """Tokenize every message's text, roles and tools included. As with a chat template, the order of JSON's keys does not
        matter."""
        tools = body.get("tools") if self._shows_tools else None
        said = [body["messages"], tools]
        effort, options = body.get("reasoning_effort"), body.get("chat_template_kwargs") or {}
        if self._skips_thinking and not options.get("enable_thinking", effort != "none"):
            said.append("<think></think>")
        return [tokenize(json.dumps(said, sort_keys=True))]

    def frame(self, job: Job, model: str) -> dict[str, Any]:
        """Return the fields that every chunk of a chat has."""
        return {"id": job.id, "object": "chat.completion.chunk", "created": job.created, "model": model}

    def whole(self, job: Job, model: str) -> dict[str, Any]:
        """Return a whole chat answer."""
        wants_ids, wants_logprobs = wants(job.request.body)
        hides = hides_reasoning(job.request.body)
        return {
            "id": job.id,
            "object": "chat.completion",
            "created": job.created,
            "model": model,
            "choices": [
                {
                    "index": item.index,
                    "message": chat_message(item) | ({"reasoning": None} if hides else {}),
                    "logprobs": chat_logprobs(item.tokens, job) if wants_logprobs and not hides else None,
                    "finish_reason": item.reply.ending,
                    "stop_reason": None,
                    "token_ids": [token.id for token in item.tokens] if wants_ids and not hides else None,
                    "routed_experts": None,
                }
                for item in job.generations
            ],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage(job),
            "prompt_logprobs": None,
            "prompt_token_ids": chat_prompt_ids(job) if wants_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, job: Job, model: str) -> list[dict[str, Any]]:
        """Return a chunk with the role for each choice."""
        ids = chat_prompt_ids(job) if wants(job.request.body)[0] else None
        return [
            {
                **self.frame(job, model),
                "choices": [
                    {
                        "index": item.index,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
                "prompt_token_ids": ids,
                "prompt_text": None,
            }
            for item in job.generations
        ]

    def chunks(self, job: Job, generation: Generation, token: ReplyToken, model: str) -> list[dict[str, Any]]:
        """Return the chunk for a token; none if it shows nothing."""
        wants_ids, wants_logprobs = (yes and not hides_reasoning(job.request.body) for yes in wants(job.request.body))
        delta = chat_delta(generation, token)
        if delta and "reasoning" in delta and hides_reasoning(job.request.body):
            delta = None
        if delta is None:
            if not generation.done and not wants_ids and not wants_logprobs:
                return []
            delta = {}
        choice: dict[str, Any] = {
            "index": generation.index,
            "delta": delta,
            "logprobs": chat_logprobs([token], job) if wants_logprobs else None,
            "finish_reason": generation.reply.ending if generation.done else None,
            "token_ids": [token.id] if wants_ids else None,
        }
        if generation.done:
            choice["stop_reason"] = None
        return [{**self.frame(job, model), "choices": [choice]}]


class CompletionShape(Shape):
    """`/v1/completions`."""

    prefix = "cmpl-"

    def prompts(self, body: Mapping[str, Any]) -> list[list[int]]:
        """Return one or many prompts, given as text or ids."""
        prompt = body["prompt"]
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        return [tokenize(item) if isinstance(item, str) else list(item) for item in prompt]

    def frame(self, job: Job, model: str) -> dict[str, Any]:
        """Return the fields that every chunk of a completion has."""
        return {"id": job.id, "object": "text_completion", "created": job.created, "model": model}

    def whole(self, job: Job, model: str) -> dict[str, Any]:
        """Return a whole completion."""
        wants_ids, wants_logprobs = job.request.body.get("return_token_ids"), completion_wants(job)
        return {
            **self.frame(job, model),
            "choices": [
                {
                    "index": item.index,
                    "text": echo_of(job, item) + item.reply.text,
                    "logprobs": completion_logprobs([*echoed(job, item), *item.tokens], job)
                    if wants_logprobs
                    else None,
                    "finish_reason": item.reply.ending,
                    "stop_reason": None,
                    "token_ids": [token.id for token in item.tokens] if wants_ids else None,
                    "prompt_logprobs": prompt_logprobs(echoed(job, item)) if wants_logprobs else None,
                    "prompt_token_ids": prompt_of(job, item) if wants_ids else None,
                    "routed_experts": None,
                }
                for item in job.generations
            ],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage(job),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, job: Job, model: str) -> list[dict[str, Any]]:
        """Return no chunks: a completion's stream begins with its first token."""
        return []

    def chunks(self, job: Job, generation: Generation, token: ReplyToken, model: str) -> list[dict[str, Any]]:
        """Return the chunk for a token, after the prompt if that is echoed."""
        wants_ids, first = job.request.body.get("return_token_ids"), generation.sampled == 1
        said = [*echoed(job, generation), token] if first else [token]
        text = echo_of(job, generation) + token.text if first else token.text
        offset = 0 if first else len(echo_of(job, generation)) + text_before(generation)
        choice = {
            "index": generation.index,
            "text": text,
            "logprobs": completion_logprobs(said, job, offset) if completion_wants(job) else None,
            "finish_reason": generation.reply.ending if generation.done else None,
            "stop_reason": None,
            "prompt_token_ids": prompt_of(job, generation) if first and (wants_ids or echoes(job)) else None,
            "token_ids": [token.id] if wants_ids else None,
        }
        return [{**self.frame(job, model), "choices": [choice]}]


def chat_message(generation: Generation) -> dict[str, Any]:
    """Return the message of a whole answer."""
    reply = generation.reply
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.text or None if reply.tool_calls else reply.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": reply.reasoning or None,
    }
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function_of(call)} for call in generation.calls
        ]
    return message


def function_of(call: ToolCall) -> dict[str, str]:
    """Return name and arguments of a tool call."""
    return {"name": call.name, "arguments": call.arguments}


def chat_delta(generation: Generation, token: ReplyToken) -> dict[str, Any] | None:
    """Return what a token adds to a chat stream: its text; or, inside tool calls, mostly None, because the tool parser
    buffers."""
    reply = generation.reply
    thoughts = len(PIECES.findall(reply.reasoning))
    before = thoughts + len(PIECES.findall(reply.text))
    if generation.sampled <= thoughts:
        return {"reasoning": token.text}
    if not reply.tool_calls or generation.sampled <= before:
        return {"content": token.text}
    texts = [item.text.strip() for item in generation.tokens[before : generation.sampled]]
    if texts[-1] == '"arguments":':
        number = texts.count('"arguments":') - 1
        call = generation.calls[number]
        said = {"id": call.id, "type": "function", "index": number, "function": {"name": call.name}}
    elif texts[-1].startswith("</tool_call>"):
        number = texts.count('"arguments":') - 1
        said = {"index": number, "function": {"arguments": reply.tool_calls[number].arguments}}
    else:
        return None
    return {"tool_calls": [said]}


def chat_logprobs(tokens: Sequence[ReplyToken], job: Job) -> dict[str, Any]:
    """Return the logprobs of a chat answer: one entry per token, or packed."""
    if packs(job):
        return unset(job, content=None) | packed_logprobs(tokens)
    return {
        "content": [
            {
                "token": item.text,
                "logprob": max(item.logprob, LOWEST),
                "bytes": list(item.text.encode()),
                "top_logprobs": [],
            }
            for item in tokens
        ]
    }


def completion_logprobs(tokens: Sequence[ReplyToken], job: Job, offset: int = 0) -> dict[str, Any]:
    """Return the logprobs of a completion as parallel lists, or packed. `offset` is where the first of the tokens begins in the
    text. A prompt's first token has no logprob."""
    if packs(job):
        return unset(job, text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[]) | packed_logprobs(tokens)
    lengths = [len(item.text) for item in tokens]
    known = [not math.isnan(item.logprob) for item in tokens]
    return {
        "text_offset": [offset + sum(lengths[:number]) for number in range(len(tokens))],
        "token_logprobs": [
            max(item.logprob, LOWEST) if here else None for item, here in zip(tokens, known, strict=True)
        ],
        "tokens": [item.text for item in tokens],
        "top_logprobs": [{item.text: item.logprob} if here else None for item, here in zip(tokens, known, strict=True)],
    }


def packs(job: Job) -> bool:
    """Whether an answer's logprobs are packed: if the server can, the request asks, and only sampled tokens have logprobs."""
    body = job.request.body
    asked = job.packs and job.request.headers.get(HEADER) == WANTED
    return asked and not (body.get("top_logprobs") or body.get("echo")) and body.get("logprobs") in (True, 0)


def chat_prompt_ids(job: Job) -> list[int] | str:
    """Return the ids of a chat's prompt, packed if the request asks and the server can."""
    packed = job.packs and job.request.headers.get(IDS_HEADER) == WANTED
    return pack_ids(job.prompts[0]) if packed else job.prompts[0]


def packed_logprobs(tokens: Sequence[ReplyToken]) -> dict[str, Any]:
    """Return the logprobs as `lightning.policy_server.packed_logprobs` sends them."""
    return {FIELD: pack(array("f", [item.logprob for item in tokens]))}


def unset(job: Job, **fields: Any) -> dict[str, Any]:
    """Return fields that were not set: whole answers have them, chunks do not."""
    return {} if job.request.body.get("stream") else fields


def echoes(job: Job) -> bool:
    """Whether a completion must begin with its prompt."""
    return bool(job.request.body.get("echo"))


def echo_of(job: Job, generation: Generation) -> str:
    """Return the prompt's text if it is echoed. vLLM leaves it out of an answer with ids."""
    return (
        detokenize(prompt_of(job, generation)) if echoes(job) and not job.request.body.get("return_token_ids") else ""
    )


def echoed(job: Job, generation: Generation) -> list[ReplyToken]:
    """Return the prompt's tokens if it is echoed, else none."""
    ids = prompt_of(job, generation) if echoes(job) else []
    return [ReplyToken(item, detokenize([item]), -0.5 if number else math.nan) for number, item in enumerate(ids)]


def prompt_logprobs(tokens: Sequence[ReplyToken]) -> list[dict[str, Any] | None] | None:
    """Return the prompt's logprobs, which vLLM computes for an echo with logprobs; None without an echo."""
    return [
        {str(item.id): {"logprob": item.logprob, "rank": 1, "decoded_token": item.text}} if number else None
        for number, item in enumerate(tokens)
    ] or None


def text_before(generation: Generation) -> int:
    """Return how many characters of a choice's own text were streamed before its last token."""
    return sum(len(item.text) for item in generation.tokens[: generation.sampled - 1])


def wants(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a chat request gets ids, and whether it gets logprobs."""
    return bool(body.get("return_token_ids")), bool(body.get("logprobs")) and body.get("top_logprobs", 0) is not None


def hides_reasoning(body: Mapping[str, Any]) -> bool:
    """Whether a chat request asks to hide the model's reasoning. With a reasoning parser, vLLM then gives no choice its ids or
    logprobs, which would show the reasoning."""
    return body.get("include_reasoning") is False


def completion_wants(job: Job) -> bool:
    """Whether a completion request gets logprobs."""
    return job.request.body.get("logprobs") is not None


def prompt_of(job: Job, generation: Generation) -> list[int]:
    """Return the prompt that a choice belongs to."""
    return job.prompts[generation.index * len(job.prompts) // job.n]


def usage(job: Job) -> dict[str, Any]:
    """Return the token counts of a request."""
    prompt, completion = sum(map(len, job.prompts)), sum(len(item.tokens) for item in job.generations)
    total = prompt + completion
    return {"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": completion}


def compact(value: Mapping[str, Any]) -> bytes:
    """JSON as pydantic writes it: no spaces, no escapes."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def error_object(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """Return vLLM's error object."""
    return {"message": message, "type": kind, "param": param, "code": status}


def too_long(shape: Shape, body: Mapping[str, Any], length: int) -> tuple[str, str, str] | None:
    """Return vLLM's refusal (message, type, parameter) of a request whose prompts leave no room for the requested tokens; None
    if they do."""
    name, wanted = shape.most_tokens(body)
    prompts, is_text = shape.prompts(body), not isinstance(body.get("prompt"), list)
    if wanted > length:
        why = f"{name}={wanted} cannot be greater than max_model_len={length}. Please request fewer output tokens."
        return f"{why} (parameter={name}, value={wanted})", "BadRequestError", name
    for prompt in prompts:
        if len(prompt) > length - wanted:
            why = (
                f"This model's maximum context length is {length} tokens. However, you requested {wanted} output tokens and "
                f"your prompt contains {{count}} input tokens, for a total of {{total}} tokens. Please reduce the length of "
                "the input prompt or the number of requested output tokens."
            )
            # vLLM makes only as many tokens of a text as show that it is too long.
            count = min(len(prompt), length - wanted + 1) if is_text else len(prompt)
            atleast = "at least " if count == length - wanted + 1 else ""
            why = why.format(count=f"{atleast}{count}", total=f"{atleast}{count + wanted}")
            return f"{why} (parameter=input_tokens, value={count})", "BadRequestError", "input_tokens"
    return None
