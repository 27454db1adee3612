"""Adapter for agents in plain Python: names the caller by `lightning.component`, else by the functions on the stack.

The invariant: it only looks and never changes what the agent does; it is asked last, so that a framework's adapter wins. It has
no `lightning_install`, since there is nothing to attach to: `@lightning.tool` reports its own runs.
"""

from __future__ import annotations

import contextlib
import sys

import lightning
from lightning.instrument import by_type, component_path, user_functions

__all__ = ["lightning_identify"]


POLICY_FAULTS = {"openai.LengthFinishReasonError": "cut_off"}
"""Exceptions that mean a fault of the model, by package and class; see `lightning_policy_fault`."""


@lightning.hookimpl(trylast=True)
def lightning_identify() -> lightning.Caller | None:
    """Name the innermost component, or without any the nearest function of the user's own code. None if there is neither."""
    path = component_path() or user_functions(above=2)
    return lightning.Caller(agent=path[-1], path=path, framework="raw") if path else None


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """Name the model's fault that an exception of the OpenAI client means; None for others."""
    return by_type(error, POLICY_FAULTS)


@lightning.hookimpl
def lightning_warm() -> None:
    """Fill the type hints and validators of a chat completion in the OpenAI client, if that is imported."""
    if "openai" in sys.modules:
        with contextlib.suppress(Exception):  # another release, whatever it raises: each rollout fills them then
            _fill_openai()


def _fill_openai() -> None:
    from openai._models import construct_type
    from openai._utils import maybe_transform
    from openai.types.chat import ChatCompletion
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

    function: dict[str, object] = {"name": "f", "arguments": "{}"}
    reply = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": ""},
        reply,
        {"role": "tool", "tool_call_id": "1", "content": ""},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
    request = {"model": "m", "messages": messages, "tools": tools, "max_tokens": 1}
    maybe_transform(request, CompletionCreateParamsNonStreaming)
    choice = {"index": 0, "finish_reason": "tool_calls", "message": reply}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    construct_type(value=answer, type_=ChatCompletion)
