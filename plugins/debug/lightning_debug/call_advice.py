"""The plugin's stage of calls: what is odd about an agent's calls, and is said in the log, once.

The invariant: nothing here changes a call, and what fails here is logged and fails no call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePath
from typing import Final
from weakref import WeakKeyDictionary

import orjson
from lightning.asyncio_utils import end
from lightning.bounded import Once
from lightning.errors import StoreError
from lightning.gateway.call import Call
from lightning.gateway.calls import LONGEST_NAME as KEPT_NAME
from lightning.gateway.calls import Parts
from lightning.gateway.dialects import Tokenize
from lightning.gateway.http import Body
from lightning.gateway.identity import ALIAS, MODEL
from lightning.gateway.policy import Policy
from lightning.gateway.stages import CallStage
from lightning.policy_server.model_facts import CURE_OF_TEMPLATE
from lightning.store.protocol import Store
from lightning.types import Transition
from lightning_dialects.chat_template import prompt_of

log = logging.getLogger(__name__)

ADVICE: Final = "advice"
"""The name of the plugin's stages, of calls and at steps."""
TRIES: Final = 3
"""Calls whose prompts are compared at most, where the policy server does not say."""
HIDDEN: Final = (
    "the model's chat template does not show the tools that an agent sent as `tools=`: the model has never heard of them; "
    f"{CURE_OF_TEMPLATE}"
)
NAMES = 256
"""Names that are looked at in all; agents choose them."""
LONGEST_NAME: Final = 100
"""Characters of a name that are looked at."""


class CallAdvice(CallStage):
    """Looks at the models that calls ask for, and whether the model is shown the tools of those that were answered."""

    api, after, before = 1, ("branches", "history", "traces"), ("texts",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._asked = AskedModels(parts.store)
        self._tools: WeakKeyDictionary[Policy, ShownTools] = WeakKeyDictionary()
        parts.closing.push_async_callback(self.close)

    async def sending(self, call: Call, body: Body) -> None:
        """Look at the model's name."""
        with _only_logged(call):
            await self._asked.look(call.claims.run, call.policy, call.sent.plan.requested_model)

    async def kept(self, call: Call, transitions: Sequence[Transition]) -> None:
        """Look at the tools of a call that was answered."""
        with _only_logged(call):
            if all(each.status.answered for each in transitions):
                tokenize = partial(self._parts.forwarder.tokenize, call.policy, call.claims.rollout)
                self._tools.setdefault(call.policy, ShownTools()).look(call.sent.plan.body, tokenize)

    async def hidden_tools(self) -> int:
        """How many calls had tools that the chat template of the gateway's own policy does not show the model, as far as that
        is known."""
        own = self._parts.policies.own
        tools = None if own is None else self._tools.get(own)
        return 0 if tools is None else await tools.hidden()

    async def close(self) -> None:
        """Find out nothing any more."""
        for tools in self._tools.values():
            await tools.close()


async def hidden_tools(parts: Parts) -> int:
    """See `CallAdvice.hidden_tools`; 0 for a gateway without that stage."""
    stage = parts.line.named(ADVICE)
    return await stage.hidden_tools() if isinstance(stage, CallAdvice) else 0


@contextlib.contextmanager
def _only_logged(call: Call) -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("a call of %s was not looked at, and goes on", call.claims.rollout)


class ShownTools:
    """Whether a policy's chat template shows the model the tools that agents send. `calls` is how many had tools that the
    model could have used.

    What is found out changes no call, since an agent may describe its tools in its own words as well. A template that knows no
    tools (plain ChatML, as many small models have) drops `tools` without a word, and the agent then waits for tool calls of a
    model that has never heard of its tools. The policy server's own tokenizer is asked, with the messages of a call that was
    answered: a prompt that is the same with and without the tools hides them.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.shown: bool | None = None
        self._tries = 0
        self._looking: asyncio.Task[None] | None = None

    def look(self, body: Body, tokenize: Tokenize) -> None:
        """A call with this chat request was answered; the first that has tools is looked at, without waiting."""
        if not body.get("tools") or body.get("tool_choice") == "none":
            return
        self.calls += 1
        if self.shown is None and self._tries < TRIES and (self._looking is None or self._looking.done()):
            self._tries += 1
            self._looking = asyncio.create_task(self._compare(body, tokenize), name="lightning-gateway-tools")

    async def hidden(self) -> int:
        """How many calls had tools that the model was not shown, as far as it is known when what is under way has ended."""
        if self._looking is not None:
            await asyncio.wait({self._looking})
        return self.calls if self.shown is False else 0

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
        except Exception as error:  # noqa: BLE001 — no answer, or one that is no vLLM's
            log.debug("whether the chat template shows tools is not known: %r", error)
            return
        if len(found) == 2:
            self.shown = found[0] != found[1]
            if not self.shown:
                log.warning("%s (said once for each policy)", HIDDEN)


class AskedModels:
    """The models' names that agents ask for. Whatever the name, the run's policy answers: one that is not the policy's may be
    meant for another model, such as a judge in the reward, and is said in the log, once. A name changes nothing of its
    call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[tuple[str, str]] = set()
        self._limit = Once()

    async def look(self, run: str, policy: Policy, model: str) -> None:
        """Warn when a call asks for a model that is not called as the run's policy is; once for each run and name."""
        if not model or model == MODEL or model.startswith(ALIAS):
            return
        name = model[:LONGEST_NAME]
        if (run, name) in self._seen:
            return
        if len(self._seen) >= NAMES:
            if self._limit.first():
                log.warning(
                    "agents have asked for %d models' names: from here on none is looked at, nor said here", NAMES
                )
            return
        self._seen.add((run, name))
        served = [slot.upstream.model[:KEPT_NAME] for slot in policy.pool.slots]  # as what is asked for is cut
        if model in served or await self._is_trained(run, model):
            return
        log.warning(
            "%r was asked for%s, and the policy answers, as it does under any name: such calls are recorded as the agent's "
            "own, and trained on where a trainer works. A judge or another model that is not to be trained needs a client "
            "with a base_url and an API key of its own, read before the rollout (in it OPENAI_BASE_URL and OPENAI_API_KEY "
            "are the policy's), or its name in the models of gateway.providers; or name its calls and leave that name out of "
            "train_agents (said once for each name)",
            name,
            f" in run {run}" if run else "",
        )

    async def _is_trained(self, run: str, model: str) -> bool:
        """Whether it is the model that the run was started with, by its whole name or the last part of it."""
        try:
            found = await self._store.get_run(run) if run else None
        except StoreError:
            return False
        name = str(found.config.get("model", "")) if found is not None else ""
        return model in (name[:KEPT_NAME], PurePath(name).name[:KEPT_NAME])
