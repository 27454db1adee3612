"""What vLLM 0.31's OpenAI server says, byte by byte, for a scripted reply: answers, chunks, ids, logprobs and nulls.

The invariant: fields are present, absent or null exactly as in vLLM (whole answers are dumped with nulls, chunks without
what was not set).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.testing.vllm_replies import PIECES, Generation, Job, Reply, Token, ToolCall, tokenize


class Shape(ABC):
    """What differs between chat and completions."""

    prefix = ""

    @abstractmethod
    def prompts(self, body: Mapping[str, Any]) -> list[list[int]]:
        """The token ids of every prompt in a request."""

    @abstractmethod
    def whole(self, job: Job, model: str) -> dict[str, Any]:
        """A whole answer, nulls included (vLLM dumps its model with them)."""

    @abstractmethod
    def opening(self, job: Job, model: str) -> list[dict[str, Any]]:
        """Chunks before the first token."""

    @abstractmethod
    def chunks(self, job: Job, generation: Generation, token: Token, model: str) -> list[dict[str, Any]]:
        """Chunks for one token (vLLM dumps these without fields that were not set)."""

    def usage_chunk(self, job: Job, model: str) -> dict[str, Any]:
        """The last chunk when usage was asked for."""
        return {**self.frame(job, model), "choices": [], "usage": usage(job)}

    @abstractmethod
    def frame(self, job: Job, model: str) -> dict[str, Any]:
        """The fields every chunk has."""


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
        hides = hides_reasoning(job.request.body)
        return {
            "id": job.id,
            "object": "chat.completion",
            "created": job.created,
            "model": model,
            "choices": [
                {
                    "index": item.index,
                    "message": chat_message(item.reply) | ({"reasoning": None} if hides else {}),
                    "logprobs": chat_logprobs(item.tokens) if wants_logprobs and not hides else None,
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


def chat_message(reply: Reply) -> dict[str, Any]:
    """The message of a whole answer."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if reply.tool_calls else reply.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": reply.reasoning or None,
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
    if generation.sampled <= len(PIECES.findall(reply.reasoning)):
        return {"reasoning": token.text}
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


def hides_reasoning(body: Mapping[str, Any]) -> bool:
    """Whether a chat request is to be told nothing of the model's reasoning: then, with a parser, vLLM gives no choice its ids
    or logprobs, which would show it."""
    return body.get("include_reasoning") is False


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
