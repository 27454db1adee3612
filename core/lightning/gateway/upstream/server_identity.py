"""Whether the server that answers at an address is the one that a trainer has named there.

The invariant: a server that does not show that it is the one is taken for another. A trainer that is killed takes its vLLM
along, and then the port is anybody's: another run's vLLM may answer there under the same name, with weights of its own.

A vLLM that its trainer has started serves its model under a name that no other start has (`PolicyServer.alias`), so that any
other vLLM refuses each call by itself. In a vLLM that somebody else runs the trainer leaves a word (`PolicyServer.claim`). It
is gone when that vLLM starts again, and is another one as soon as another trainer attaches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import orjson

if TYPE_CHECKING:
    from lightning.gateway.upstream.servers import Slot

TIMEOUT = aiohttp.ClientTimeout(total=5.0)
SHOWN = 3
"""Models of another server that are named."""


async def strangeness(slot: Slot, session: aiohttp.ClientSession) -> str:
    """What shows that another server answers; empty for the one that was named.

    Raises what aiohttp raises, also for an answer of 500 and above, which tells nothing.
    """
    listed = await _ask(session, "GET", slot, "/v1/models")
    served = [str(card.get("id")) for card in _objects(listed, "data")]
    if slot.upstream.model not in served:
        return f"it serves {', '.join(served[:SHOWN]) or 'no model'} and not {slot.upstream.model}"
    if not slot.upstream.claim:
        return ""
    told = await _ask(session, "POST", slot, "/collective_rpc", {"method": "lightning_attach", "args": []})
    claims = {answer.get("claim") for answer in _objects(told, "results")}
    return "" if claims == {slot.upstream.claim} else "it was started again, or another trainer has attached to it"


async def _ask(
    session: aiohttp.ClientSession, verb: str, slot: Slot, path: str, body: dict[str, object] | None = None
) -> object:
    """The answer's JSON; None when it is no answer of this route."""
    async with session.request(
        verb,
        slot.url(path),
        data=None if body is None else orjson.dumps(body),
        timeout=TIMEOUT,
        allow_redirects=False,
    ) as answer:
        if answer.status >= 500:
            answer.raise_for_status()
        if answer.status != 200:
            return None
        try:
            return orjson.loads(await answer.read())
        except orjson.JSONDecodeError:
            return None


def _objects(answer: object, key: str) -> list[dict[str, object]]:
    """The list of objects under a key; empty where there is none."""
    found = answer.get(key) if isinstance(answer, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
