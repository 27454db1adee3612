"""Keeps a word of the agent's own with each model call, and answers pings without the model."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import lightning
from lightning.gateway.http import RefusalError
from lightning.gateway.stages import CallStage
from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.gateway.call import Answer, Call, Request
    from lightning.gateway.calls import Parts
    from starlette.types import ASGIApp

TAG = "tag"
LONGEST = 100
"""Characters of a tag."""


class TagStage(CallStage):
    """Reads the header `x-tag` and stores it as the extra `tag`."""

    api, after = 1, ("texts",)

    def __init__(self) -> None:
        self._tags: WeakKeyDictionary[Call, str] = WeakKeyDictionary()

    async def admitted(self, call: Call, request: Request) -> ASGIApp | None:
        """Answer a ping; remember the tag of any other call."""
        messages = request.body.get("messages")
        if isinstance(messages, list) and messages and messages[-1] == {"role": "user", "content": "ping"}:
            return JSONResponse({"choices": [{"index": 0, "message": {"role": "assistant", "content": "pong"}}]})
        tag = dict(request.scope["headers"]).get(b"x-tag", b"").decode("latin-1")
        if len(tag) > LONGEST:
            raise RefusalError(
                400, "tag_too_long", f"The header x-tag has {len(tag)} characters; send at most {LONGEST}."
            )
        if tag:
            self._tags[call] = tag
        return None

    async def settled(self, call: Call, answer: Answer) -> None:
        """Store the tag in the very write that makes the call durable."""
        if (tag := self._tags.get(call)) is not None:
            call.extras[TAG] = tag.encode()


@lightning.hookimpl
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Stand in the line of every gateway."""
    register(TAG, lambda parts: TagStage())
