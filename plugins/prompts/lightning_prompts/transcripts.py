"""Rollouts as text for the optimiser model: prompts and answers of their calls, and their tool runs.

The invariant: the policy server turns the recorded tokens into text. The part of a prompt that repeats earlier calls is left
out.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

import aiohttp
from lightning.bounded import Once
from lightning.policy_server.protocol import PolicyServer
from lightning.store.codec import ITEM, pack
from lightning.store.protocol import Store
from lightning.types import Rollout, ToolEvent, Transition, shared_prefix

logger = logging.getLogger(__name__)

LONGEST_PART = 2000
"""Most characters of a call's prompt, of its response, and of a tool's output; the middle of a longer text is left out."""
LONGEST = 16_000
"""Most characters of a transcript, whose middle is left out otherwise: several transcripts must fit into one question."""
SECONDS = 30.0
NO_SUCH_PATH = frozenset({404, 405, 501})
"""Statuses of a server that cannot turn tokens into text, so that it is not asked again."""


class Transcripts:
    """Makes transcripts of rollouts. If the policy server cannot turn tokens into text, a transcript has only the tool runs,
    and a warning is logged once."""

    def __init__(self, store: Store, policy: PolicyServer) -> None:
        self._store, self._policy = store, policy
        self._silent, self._said = False, Once()

    async def of(self, rollout: Rollout) -> str:
        """Return the transcript of a finished rollout."""
        calls = [call for call in await self._store.transitions(rollout.id) if call.status.answered]
        (attempt,) = await self._store.attempts_of([(rollout.id, None)])
        said = await self._calls(calls)
        told = [*said, *(_tool(event) for event in attempt.tool_events)]
        return _clipped("\n".join(told), LONGEST)

    async def _calls(self, calls: Sequence[Transition]) -> list[str]:
        told: list[str] = []
        before: list[bytes] = []
        for number, call in enumerate(calls, 1):
            prompt, packed = list(call.prompt_ids), pack(call.prompt_ids)
            known = max((shared_prefix(packed, other, ITEM) for other in before), default=0)
            texts = await asyncio.gather(self._text(prompt[known:]), self._text(list(call.response_ids)))
            if None in texts:
                return []
            before.append(packed + pack(call.response_ids))
            path = "/".join(call.caller.path) or call.caller.agent
            asked, answered = (_clipped(text or "") for text in texts)
            told.append(f"[model call {number}, by {path}]\n{asked}\n[response]\n{answered}")
        return told

    async def _text(self, ids: Sequence[int]) -> str | None:
        """Turn tokens into text with vLLM's /detokenize; None if the server cannot."""
        if self._silent or not ids:
            return None if self._silent else ""
        body = {"model": self._policy.model, "tokens": list(ids)}
        try:
            timeout = aiohttp.ClientTimeout(total=SECONDS)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{self._policy.url}/detokenize", json=body) as reply,
            ):
                reply.raise_for_status()
                return str((await reply.json())["prompt"])
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError, TypeError) as error:
            if self._said.first():
                logger.warning("transcripts have no model calls: %s/detokenize failed (%s)", self._policy.url, error)
            self._silent |= isinstance(error, aiohttp.ClientResponseError) and error.status in NO_SUCH_PATH
            return None


def _tool(event: ToolEvent) -> str:
    arguments = "" if event.arguments is None else json.dumps(event.arguments, ensure_ascii=False, default=str)
    return f"[tool {event.name}({_clipped(arguments)}): {event.status}] {_clipped(event.error or event.output)}"


def _clipped(text: str, longest: int = LONGEST_PART) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} [...] {text[-half:]}"
