"""The plugin's call stage: it logs a warning, once, about calls for unknown models and tools that the model is not shown.

The invariant: nothing here changes a call, and an error here is logged and fails no call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Final, cast
from weakref import WeakKeyDictionary

import orjson
from lightning.asyncio_utils import end
from lightning.bounded import Once
from lightning.errors import StoreError
from lightning.gateway.call import Call
from lightning.gateway.calls import LONGEST_NAME as KEPT_NAME
from lightning.gateway.calls import PROCESS, Parts
from lightning.gateway.dialects import Tokenize
from lightning.gateway.http import Body
from lightning.gateway.identity import ALIAS, MODEL
from lightning.gateway.policy import Policy
from lightning.gateway.stages import CallStage
from lightning.policy_server.model_folder import CURE_OF_TEMPLATE
from lightning.store.protocol import Store
from lightning.types import POLICY, Transition
from lightning_dialects.chat_template import prompt_of

log = logging.getLogger(__name__)

ADVICE: Final = "advice"
"""The name of this plugin's call stage and step stage."""
ELSEWHERE: Final = "hidden_tools"
"""The key of a run's state with the calls with hidden tools by gateway process: how many, and when that was told."""
TELL_SECONDS: Final = 1.0
TRIES: Final = 3
"""Most calls whose prompts are compared, if the policy server gives no usable answer."""
HIDDEN: Final = (
    "the model's chat template does not show the tools that an agent sent as `tools=`: the model has never heard of them; "
    f"{CURE_OF_TEMPLATE}"
)
NAMES = 256
"""Most different model names that are checked; the number is bounded because agents choose the names."""
LONGEST_NAME: Final = 100
"""Most characters of a model name that are kept."""


class CallAdvice(CallStage):
    """Checks the model name of each call, and whether the chat template shows the model the tools of answered calls."""

    api, after, before = 1, ("branches", "history", "traces"), ("texts",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._asked = AskedModels(parts.store)
        self._tools: WeakKeyDictionary[Policy, ShownTools] = WeakKeyDictionary()
        self._since, self._told = time.time(), 0.0
        parts.closing.push_async_callback(self.close)

    async def sending(self, call: Call, body: Body) -> None:
        """Check the model name that a call asks for, unless the run has several policies, which may be chosen by that name."""
        if call.policy_name != POLICY:
            return
        with _only_logged(call):
            await self._asked.look(call.claims.run, call.policy, call.sent.plan.requested_model)

    async def kept(self, call: Call, transitions: Sequence[Transition]) -> None:
        """Check whether the model is shown the tools of an answered call."""
        with _only_logged(call):
            if all(each.status.answered for each in transitions):
                tokenize = partial(self._parts.forwarder.tokenize, call.policy, call.claims.rollout)
                tools = self._tools.setdefault(call.policy, ShownTools())
                tools.look(call.sent.plan.body, tokenize)
                if tools.shown is False and call.policy is not self._parts.policies.own:
                    await self._tell(call.claims.run, tools.calls)

    async def _tell(self, run: str, calls: int) -> None:
        """Tell the run's trainer, which is another process, how many calls had hidden tools here; once a second."""
        if (now := time.time()) - self._told >= TELL_SECONDS:
            self._told, store = now, self._parts.store
            kept = await store.get_state(run, ELSEWHERE)
            others = kept if isinstance(kept, Mapping) else {}
            await store.put_state(run, ELSEWHERE, {**others, PROCESS: [calls, now]}, once=None)

    async def hidden_tools(self, run: str = "") -> int:
        """Count the calls with tools that the chat template of the gateway's own policy does not show the model; 0 if that is
        not known. With a `run` count those that gateways in other processes have told of since this one began, too."""
        own = self._parts.policies.own
        tools = None if own is None else self._tools.get(own)
        told = await self._parts.store.get_state(run, ELSEWHERE) if run and self._parts.shared else None
        others = cast("Mapping[str, tuple[int, float]]", told or {}).values()
        here = 0 if tools is None else await tools.hidden()
        return here + sum(calls for calls, when in others if when >= self._since)

    async def close(self) -> None:
        """Stop the checks that are running."""
        for tools in self._tools.values():
            await tools.close()


async def hidden_tools(parts: Parts, run: str = "") -> int:
    """Return `CallAdvice.hidden_tools` of a gateway; 0 if the gateway does not have this stage."""
    stage = parts.line.named(ADVICE)
    return await stage.hidden_tools(run) if isinstance(stage, CallAdvice) else 0


@contextlib.contextmanager
def _only_logged(call: Call) -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("a call of rollout %s could not be checked, and goes on", call.claims.rollout)


class ShownTools:
    """Finds out whether a policy's chat template shows the model the tools that agents send. `calls` counts the calls with
    tools that the model could have used; `shown` is None until it is known.

    A template without support for tools (plain ChatML, as many small models have) silently drops `tools`, and the agent then
    waits for tool calls of a model that does not know its tools. To find out, the messages of an answered call are tokenized by
    the policy server with and without the tools: equal prompts mean that the tools are hidden. The result changes no call,
    since an agent may also describe its tools in its own words.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.shown: bool | None = None
        self._tries = 0
        self._looking: asyncio.Task[None] | None = None

    def look(self, body: Body, tokenize: Tokenize) -> None:
        """Count an answered call with this chat request if it has tools, and check the first such call in the background."""
        if not body.get("tools") or body.get("tool_choice") == "none":
            return
        self.calls += 1
        if self.shown is None and self._tries < TRIES and (self._looking is None or self._looking.done()):
            self._tries += 1
            self._looking = asyncio.create_task(self._compare(body, tokenize), name="lightning-gateway-tools")

    async def hidden(self) -> int:
        """Wait for a running check, and return how many calls had tools that the model was not shown; 0 if not known."""
        if self._looking is not None:
            await asyncio.wait({self._looking})
        return self.calls if self.shown is False else 0

    async def close(self) -> None:
        """Stop the check that is running."""
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
    """Warns about calls that ask for another model than the policy. The policy answers a call under any name, so that such a
    call, perhaps meant for a judge in the reward, is trained on. Each name is logged once and changes no call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[tuple[str, str]] = set()
        self._limit = Once()

    async def look(self, run: str, policy: Policy, model: str) -> None:
        """Warn if a call asks for a model whose name is not the policy's, once for each run and name."""
        if not model or model == MODEL or model.startswith(ALIAS):
            return
        name = model[:LONGEST_NAME]
        if (run, name) in self._seen:
            return
        if len(self._seen) >= NAMES:
            if self._limit.first():
                log.warning(
                    "agents have asked for %d different models: further names are neither checked nor logged", NAMES
                )
            return
        self._seen.add((run, name))
        served = [slot.upstream.model[:KEPT_NAME] for slot in policy.pool.slots]  # cut as requested names are
        if model in served or await self._is_trained(run, model):
            return
        log.warning(
            "an agent%s asked for the model %r. The gateway always answers with the policy, so such calls are recorded as "
            "the agent's own, and trained on if a trainer runs. A judge or another model that must not be trained needs a "
            "client with a base_url and an API key of its own, read before the rollout (during it, OPENAI_BASE_URL and "
            "OPENAI_API_KEY are the policy's), or its name in the models of gateway.providers; or name its calls and leave "
            "that name out of train_agents (said once for each name)",
            f" in run {run}" if run else "",
            name,
        )

    async def _is_trained(self, run: str, model: str) -> bool:
        """Return whether the name is that of the model that the run was started with, whole or its last path component."""
        try:
            found = await self._store.get_run(run) if run else None
        except StoreError:
            return False
        name = str(found.config.get("model", "")) if found is not None else ""
        return model in (name[:KEPT_NAME], PurePath(name).name[:KEPT_NAME])
