"""What vLLM 0.31's OpenAI server says, byte by byte, for a scripted reply: answers, chunks, ids, logprobs and nulls.

The invariant: fields are present, absent or null exactly as in vLLM (whole answers are dumped with nulls, chunks without
what was not set); only the tokens are made up: one per word, the same word always with the same id.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EOS = 2
VOCABULARY = 32_000
PIECES = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a reply; `arguments` is JSON text."""

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True)
class Reply:
    """What one request is answered with. Ids and logprobs are made from the text unless given; times are in seconds.

    `delay` passes before the first token, `token_delay` between tokens. `status` other than 200 answers with vLLM's
    error object. `die_after` tokens the connection is cut (0: before anything is sent), `error_after` tokens a stream
    ends with vLLM's error event. `raw` replaces the whole body. `chunk_bytes` cuts a stream's bytes at odd places.
    """

    text: str = "hello from the fake policy"
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
class Token:
    """One token of a reply: its id, its text, its logprob."""

    id: int
    text: str
    logprob: float


@dataclass
class Generation:
    """One choice being sampled. `sampled` is how many tokens the engine has produced, `done` that it has ended."""

    index: int
    reply: Reply
    tokens: list[Token]
    sampled: int = 0
    done: bool = False


@dataclass(eq=False)
class Job:
    """A request in the fake engine."""

    request: Recorded
    generations: list[Generation]
    prompts: list[list[int]]
    id: str
    created: int

    @property
    def n(self) -> int:
        """How many choices it has."""
        return len(self.generations)

    def key(self, index: int) -> str:
        """How a policy server names this choice in `Update.in_flight` (one prompt, or one choice for each)."""
        request_id = self.request.request_id
        several = self.n > 1 if len(self.prompts) == 1 else index > 0
        return f"{index}_{request_id}" if several else request_id


class Shape:
    """What differs between chat and completions."""

    prefix = ""

    def prompts(self, body: Mapping[str, Any]) -> list[list[int]]:
        """The token ids of every prompt in a request."""
        raise NotImplementedError

    def whole(self, job: Job, model: str) -> dict[str, Any]:
        """A whole answer, nulls included (vLLM dumps its model with them)."""
        raise NotImplementedError

    def opening(self, job: Job, model: str) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        raise NotImplementedError

    def chunks(self, job: Job, generation: Generation, token: Token, model: str) -> list[dict[str, Any]]:
        """Chunks for one token (vLLM dumps these without fields that were not set)."""
        raise NotImplementedError

    def usage_chunk(self, job: Job, model: str) -> dict[str, Any]:
        """The last chunk when usage was asked for."""
        return {**self.frame(job, model), "choices": [], "usage": usage(job)}

    def frame(self, job: Job, model: str) -> dict[str, Any]:
        """The fields every chunk has."""
        raise NotImplementedError


class ChatShape(Shape):
    """`/v1/chat/completions` with a hermes-like tool parser."""

    prefix = "chatcmpl-"

    def prompts(self, body: Mapping[str, Any]) -> list[list[int]]:
        """Every message's text, roles and tools included; as with a chat template, the order of JSON's keys is no matter."""
        return [tokenize(json.dumps([body["messages"], body.get("tools")], sort_keys=True))]

    def frame(self, job: Job, model: str) -> dict[str, Any]:
        """See `Shape`."""
        return {"id": job.id, "object": "chat.completion.chunk", "created": job.created, "model": model}

    def whole(self, job: Job, model: str) -> dict[str, Any]:
        """See `Shape`."""
        wants_ids, wants_logprobs = wants(job.request.body)
        return {
            "id": job.id,
            "object": "chat.completion",
            "created": job.created,
            "model": model,
            "choices": [
                {
                    "index": item.index,
                    "message": chat_message(item.reply),
                    "logprobs": chat_logprobs(item.tokens) if wants_logprobs else None,
                    "finish_reason": item.reply.ending,
                    "stop_reason": None,
                    "token_ids": [token.id for token in item.tokens] if wants_ids else None,
                    "routed_experts": None,
                }
                for item in job.generations
            ],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage(job),
            "prompt_logprobs": None,
            "prompt_token_ids": job.prompts[0] if wants_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, job: Job, model: str) -> list[dict[str, Any]]:
        """See `Shape`."""
        ids = job.prompts[0] if wants(job.request.body)[0] else None
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

    def chunks(self, job: Job, generation: Generation, token: Token, model: str) -> list[dict[str, Any]]:
        """See `Shape`."""
        wants_ids, wants_logprobs = wants(job.request.body)
        delta = chat_delta(generation, token)
        if delta is None:
            if not generation.done and not wants_ids and not wants_logprobs:
                return []
            delta = {}
        choice: dict[str, Any] = {
            "index": generation.index,
            "delta": delta,
            "logprobs": chat_logprobs([token]) if wants_logprobs else None,
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
        """One or many prompts, as text or ids."""
        prompt = body["prompt"]
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        return [tokenize(item) if isinstance(item, str) else list(item) for item in prompt]

    def frame(self, job: Job, model: str) -> dict[str, Any]:
        """See `Shape`."""
        return {"id": job.id, "object": "text_completion", "created": job.created, "model": model}

    def whole(self, job: Job, model: str) -> dict[str, Any]:
        """See `Shape`."""
        wants_ids, wants_logprobs = job.request.body.get("return_token_ids"), completion_wants(job)
        return {
            **self.frame(job, model),
            "choices": [
                {
                    "index": item.index,
                    "text": item.reply.text,
                    "logprobs": completion_logprobs(item.tokens) if wants_logprobs else None,
                    "finish_reason": item.reply.ending,
                    "stop_reason": None,
                    "token_ids": [token.id for token in item.tokens] if wants_ids else None,
                    "prompt_logprobs": None,
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
        """See `Shape`."""
        return []

    def chunks(self, job: Job, generation: Generation, token: Token, model: str) -> list[dict[str, Any]]:
        """See `Shape`."""
        wants_ids = job.request.body.get("return_token_ids")
        choice = {
            "index": generation.index,
            "text": token.text,
            "logprobs": completion_logprobs([token]) if completion_wants(job) else None,
            "finish_reason": generation.reply.ending if generation.done else None,
            "stop_reason": None,
            "prompt_token_ids": prompt_of(job, generation) if wants_ids and generation.sampled == 1 else None,
            "token_ids": [token.id] if wants_ids else None,
        }
        return [{**self.frame(job, model), "choices": [choice]}]


def tokenize(text: str) -> list[int]:
    """Made-up ids, one per word: the same word has the same id everywhere."""
    return [3 + zlib.crc32(piece.encode()) % (VOCABULARY - 3) for piece in PIECES.findall(text)]


def tokenize_reply(reply: Reply, index: int) -> list[Token]:
    """The tokens a reply is made of, end-of-sequence included when it stopped by itself."""
    text = reply.text if not reply.tool_calls else tool_text(reply)
    pieces = PIECES.findall(text) or [""]
    ids = tokenize(text) or [3]
    if reply.token_ids is not None:
        ids = list(reply.token_ids)
        pieces = [*pieces[: len(ids)], *[""] * (len(ids) - len(pieces))]
    elif reply.ending in {"stop", "tool_calls"}:
        ids, pieces = [*ids, EOS], [*pieces, ""]
    values = reply.logprobs or [-((token * 37 + index * 11 + 5) % 100) / 50 - 0.01 for token in ids]
    return [Token(*item) for item in zip(ids, pieces, values, strict=True)]


def tool_text(reply: Reply) -> str:
    """Tool calls as hermes models write them."""
    calls = (
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in reply.tool_calls
    )
    return "\n".join(calls)


def chat_message(reply: Reply) -> dict[str, Any]:
    """The message of a whole answer."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if reply.tool_calls else reply.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id or f"call_{number}", "type": "function", "function": function_of(call)}
            for number, call in enumerate(reply.tool_calls)
        ]
    return message


def function_of(call: ToolCall) -> dict[str, str]:
    """Name and arguments."""
    return {"name": call.name, "arguments": call.arguments}


def chat_delta(generation: Generation, token: Token) -> dict[str, Any] | None:
    """What a token shows: its text; or, inside tool calls, mostly nothing, because the tool parser buffers."""
    reply = generation.reply
    if not reply.tool_calls:
        return {"content": token.text}
    texts = [item.text.strip() for item in generation.tokens[: generation.sampled]]
    if texts[-1] == '"arguments":':
        number = texts.count('"arguments":') - 1
        call = reply.tool_calls[number]
        said = {"id": call.id or f"call_{number}", "type": "function", "index": number, "function": {"name": call.name}}
    elif texts[-1].startswith("</tool_call>"):
        number = texts.count('"arguments":') - 1
        said = {"index": number, "function": {"arguments": reply.tool_calls[number].arguments}}
    else:
        return None
    return {"tool_calls": [said]}


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """One entry per token."""
    return {
        "content": [
            {"token": item.text, "logprob": item.logprob, "bytes": list(item.text.encode()), "top_logprobs": []}
            for item in tokens
        ]
    }


def completion_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Parallel lists."""
    return {
        "text_offset": [0] * len(tokens),
        "token_logprobs": [item.logprob for item in tokens],
        "tokens": [item.text for item in tokens],
        "top_logprobs": [{item.text: item.logprob} for item in tokens],
    }


def wants(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a chat request gets ids, and whether it gets logprobs."""
    return bool(body.get("return_token_ids")), bool(body.get("logprobs")) and body.get("top_logprobs", 0) is not None


def completion_wants(job: Job) -> bool:
    """Whether a completion request gets logprobs."""
    return job.request.body.get("logprobs") is not None


def prompt_of(job: Job, generation: Generation) -> list[int]:
    """The prompt a choice belongs to."""
    return job.prompts[generation.index * len(job.prompts) // job.n]


def usage(job: Job) -> dict[str, Any]:
    """Token counts."""
    prompt, completion = sum(map(len, job.prompts)), sum(len(item.tokens) for item in job.generations)
    total = prompt + completion
    return {"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": completion}


def compact(value: Mapping[str, Any]) -> bytes:
    """JSON as pydantic writes it: no spaces, no escapes."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def error_object(status: int, message: str, kind: str) -> dict[str, Any]:
    """vLLM's error."""
    return {"message": message, "type": kind, "param": None, "code": status}
