"""Whether the policy's chat template shows the model the tools of a request, found out by asking the policy server's tokenizer.

The invariant: nothing is assumed of a template, and what is found out changes no call: it is said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import aiohttp
import orjson

from lightning.asyncio_utils import end
from lightning.gateway.http import Body, RefusalError, UpstreamError

log = logging.getLogger(__name__)

Tokenize = Callable[[Body], Awaitable[tuple[int, bytes]]]
"""Status and body of `/tokenize` for a chat prompt."""
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
"""What of a chat request makes its prompt, under the names that `/tokenize` takes."""
FOR_THE_TEMPLATE = ("reasoning_effort", "documents")
"""What vLLM's chat gives the template as well, and `/tokenize` takes among the template's own parameters."""
UNKNOWN = (aiohttp.ClientError, OSError, UpstreamError, RefusalError, ValueError, KeyError, TypeError)
"""What asking raises when there is no answer, or one that is no vLLM's."""
TRIES = 3
"""Calls whose prompts are compared at most, where the policy server does not say."""
CURE_OF_TEMPLATE = (
    "give vLLM a template that shows tools (policy_server.args: --chat-template FILE), take a model whose template knows them, "
    "or describe the tools in the agent's own prompt"
)
HIDDEN = (
    "the model's chat template does not show the tools that an agent sent as `tools=`: the model has never heard of them; "
    f"{CURE_OF_TEMPLATE}"
)


class ShownTools:
    """Whether the policy's chat template shows the model the tools that agents send. `calls` is how many had tools that the
    model could have used.

    What is found out changes no call, since an agent may describe its tools in its own words as well. A template that knows no
    tools (plain ChatML, as many small models have) drops `tools` without a word, and the agent then waits for tool calls of a
    model that has never heard of its tools. The policy server's own tokenizer is asked, with the messages of a call that was
    answered: a prompt that is the same with and without the tools hides them.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._shown: bool | None = None
        self._tries = 0
        self._looking: asyncio.Task[None] | None = None

    def look(self, body: Body, tokenize: Tokenize) -> None:
        """A call with this chat request was answered; the first that has tools is looked at, without waiting."""
        if not body.get("tools") or body.get("tool_choice") == "none":
            return
        self.calls += 1
        if self._shown is None and self._tries < TRIES and (self._looking is None or self._looking.done()):
            self._tries += 1
            self._looking = asyncio.create_task(self._compare(body, tokenize), name="lightning-gateway-tools")

    async def hidden(self) -> int:
        """How many calls had tools that the model was not shown, as far as it is known when what is under way has ended."""
        if self._looking is not None:
            await asyncio.wait({self._looking})
        return self.calls if self._shown is False else 0

    async def close(self) -> None:
        """Find out nothing any more."""
        if self._looking is not None:
            await end(self._looking)

    async def _compare(self, body: Body, tokenize: Tokenize) -> None:
        try:
            prompt = prompt_of(body)
            with_tools = await tokenize(prompt)
            without = await tokenize({name: value for name, value in prompt.items() if name != "tools"})
            found = [orjson.loads(payload)["tokens"] for status, payload in (with_tools, without) if status == 200]
        except UNKNOWN as error:
            log.debug("whether the chat template shows tools is not known: %r", error)
            return
        if len(found) == 2:
            self._shown = found[0] != found[1]
            if not self._shown:
                log.warning("%s (said once for each policy)", HIDDEN)


def effort_in_template(effort: object) -> dict[str, object]:
    """What vLLM's chat gives a template for `reasoning_effort`."""
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def prompt_of(chat: Body) -> Body:
    """What vLLM's `/tokenize` needs to make the prompt that a chat request has."""
    prompt = {name: chat[name] for name in IN_THE_PROMPT if name in chat}
    given = {name: chat[name] for name in FOR_THE_TEMPLATE if chat.get(name) is not None}
    if given:
        thinking = effort_in_template(given["reasoning_effort"]) if "reasoning_effort" in given else {}
        prompt["chat_template_kwargs"] = thinking | (chat.get("chat_template_kwargs") or {}) | given
    return prompt
