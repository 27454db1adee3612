"""Find out what a policy's chat template supports, by tokenizing test prompts with the policy server. vLLM's own `/v1/messages`
asks the same questions when it starts.

The invariant: nothing is assumed about a template. Each question is asked once for a policy, with prompts that differ only in
the property in question. Without an answer, requests are sent unchanged, and a warning is logged.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import orjson
from lightning.gateway.dialects import Tokenize
from lightning.gateway.http import Body, RefusalError, UpstreamError
from lightning.gateway.policy import Policy
from lightning.gateway.upstream import UNANSWERED

log = logging.getLogger(__name__)

IN_THE_PROMPT = (
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "media_io_kwargs",
    "mm_processor_kwargs",
)
"""The fields of a chat request that determine its prompt; `/tokenize` takes them under the same names."""
FOR_THE_TEMPLATE = ("reasoning_effort", "documents")
"""More fields that vLLM's chat passes to the template; `/tokenize` takes them in `chat_template_kwargs`."""
NO_ANSWER = (*UNANSWERED, RefusalError, ValueError, KeyError, TypeError)
"""Exceptions for a policy server that gives no answer, or one without vLLM's shape."""
SYSTEM_LATER = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
A_TOOL = {"type": "function", "function": {"name": "t", "parameters": {"type": "object", "properties": {}}}}
EFFORTS = ("low", "medium", "high", "xhigh", "max")
MERGED = (
    "the model's chat template takes the system's words at the beginning only: those of later messages of /v1/messages are "
    "joined to them, as vLLM does. Each changes the beginning of the prompt, so that the calls of a conversation share less of "
    "it; a template that takes them where they stand (policy_server.args: --chat-template FILE) avoids that"
)
AS_IT_IS = "requests go on as they are (said once for each policy)"
ASK_AGAIN = 60.0
"""Seconds until a policy server that could not answer is asked again."""


def effort_in_template(effort: object) -> dict[str, object]:
    """Return the parameters that vLLM's chat passes to a template for a `reasoning_effort`."""
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def prompt_of(chat: Body) -> Body:
    """Return the request to vLLM's `/tokenize` that makes the same prompt as a chat request."""
    prompt = {name: chat[name] for name in IN_THE_PROMPT if name in chat}
    given = {name: chat[name] for name in FOR_THE_TEMPLATE if chat.get(name) is not None}
    if given:
        thinking = effort_in_template(given["reasoning_effort"]) if "reasoning_effort" in given else {}
        prompt["chat_template_kwargs"] = thinking | (chat.get("chat_template_kwargs") or {}) | given
    return prompt


@dataclass(slots=True, eq=False)
class _Question:
    """One question about a template: the answer `found`, or when and how asking failed last."""

    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    found: bool | None = None
    failed_at: float = -math.inf
    refusal: RefusalError | None = None
    told: bool = False


class ChatTemplate:
    """Answers questions about a policy's chat template. Its methods raise `RefusalError` (503) if no policy server is up.

    Callers that ask at the same time share one answer. After a failure, a question is not asked again for `ASK_AGAIN` seconds.
    """

    def __init__(self) -> None:
        self._questions: dict[str, _Question] = {}

    async def wants_system_first(self, tokenize: Tokenize) -> bool:
        """Return whether the template refuses a system message after the first message, with or without tools; False if not
        known."""
        return await self._once("takes a system message later on", tokenize, _takes_later_system) is False

    async def can_skip_thinking(self, tokenize: Tokenize) -> bool:
        """Return whether the template can turn thinking off: its prompt for the effort "none" differs from all others. True if
        not known."""
        return await self._once("can do without thinking", tokenize, _heeds_none) is not False

    async def _once(self, what: str, tokenize: Tokenize, find: Callable[[Tokenize], Awaitable[bool]]) -> bool | None:
        """Return the answer to a question, which the first caller finds with `find`; None if it is not known."""
        question, began = self._questions.setdefault(what, _Question()), time.monotonic()
        async with question.asking:
            if question.refusal is not None and question.failed_at > began:  # another caller failed meanwhile
                raise question.refusal
            if question.found is None and (question.refusal or time.monotonic() - question.failed_at > ASK_AGAIN):
                await _ask(question, what, tokenize, find)
            return question.found


async def _ask(question: _Question, what: str, tokenize: Tokenize, find: Callable[[Tokenize], Awaitable[bool]]) -> None:
    """Ask a question with `find`, and keep the answer or the failure. Raises `RefusalError` if no policy server is up."""
    question.refusal = None
    try:
        question.found = await find(tokenize)
    except RefusalError as refusal:
        question.failed_at, question.refusal = time.monotonic(), refusal
        raise
    except NO_ANSWER as error:
        question.failed_at = time.monotonic()
        if not question.told:
            question.told = True
            log.warning("could not find out whether the model's chat template %s (%r): %s", what, error, AS_IT_IS)


async def _prompt(tokenize: Tokenize, body: Body) -> list[int] | None:
    """Return the tokens of a prompt, or None if the template refuses it. Raises one of `NO_ANSWER` without an answer."""
    status, payload = await tokenize(body)
    if status == 400:
        return None
    if status != 200:
        raise UpstreamError(f"/tokenize answered with status {status}")
    tokens: list[int] = orjson.loads(payload)["tokens"]
    return tokens


async def _takes_later_system(tokenize: Tokenize) -> bool:
    prompts = [await _prompt(tokenize, {"messages": SYSTEM_LATER} | more) for more in ({}, {"tools": [A_TOOL]})]
    if refuses := None in prompts:
        log.warning("%s (said once for each policy)", MERGED)
    return not refuses


async def _heeds_none(tokenize: Tokenize) -> bool:
    async def prompt(effort: str) -> list[int] | None:
        hi = [{"role": "user", "content": "Hi"}]
        return await _prompt(tokenize, {"messages": hi, "chat_template_kwargs": effort_in_template(effort)})

    without = await prompt("none")
    return without is not None and without not in [await prompt(effort) for effort in EFFORTS]


_known: WeakKeyDictionary[Policy, dict[str | None, ChatTemplate]] = WeakKeyDictionary()


def template_of(policy: Policy, name: str | None) -> ChatTemplate:
    """Return the `ChatTemplate` of a run's policy with this name, with the answers found so far."""
    return _known.setdefault(policy, {}).setdefault(name, ChatTemplate())
