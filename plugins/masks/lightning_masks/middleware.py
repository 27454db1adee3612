"""Sends the masks of sampled tokens in vLLM's answers, to requests that ask for them by a header.

The invariant: the masks are those of the tokens of the same chunk, in order; if one is missing, none is sent. A request without
the header gets the usual answer.

`vllm serve --middleware lightning_masks.middleware.SamplingMasks` installs this middleware. It stands behind that of the core,
which packs logprobs, whichever comes first among the arguments.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

from lightning.policy_server import packed_logprobs

from lightning_masks.codes import ASKED, HEADER, NAME, WANTED
from lightning_masks.texts import Budget, Texts
from lightning_masks.worker import in_front

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
MARK = (HEADER.encode(), WANTED.encode())

_wanted: ContextVar[Budget | None] = ContextVar("lightning_masks", default=None)


class SamplingMasks:
    """The ASGI middleware. It marks a request that has the header, for all code of vLLM that works for this request."""

    def __init__(self, app: App) -> None:
        self._app = app
        try:
            install()
        except (ImportError, AttributeError) as error:
            logger.warning("no sampling masks: this vLLM is not one that sends them (%r)", error)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request, marked if it has the header."""
        token = _wanted.set(Budget() if MARK in scope.get("headers", ()) else None)
        try:
            await self._app(scope, receive, send)
        finally:
            _wanted.reset(token)


class Carrying:
    """The part of a list of logprobs that carries the number of the mask of each, and the choice's `texts`."""

    masks: list[int | None]
    texts: Texts

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)  # type: ignore[misc]  # the list's
        return carrying(found, self.texts, self.masks[place]) if isinstance(place, slice) else found

    def extend(self, others: Iterable[Any]) -> None:
        """Append logprobs, with their masks if they carry any."""
        super().extend(others)  # type: ignore[misc]  # the list's
        if isinstance(others, Carrying):
            self.masks.extend(others.masks)

    def note(self, count: int, mask: tuple[int, bytes] | None) -> None:
        """Take the mask of the last of the logprobs, of which `count` are new; of several, none is known."""
        self.masks.extend([None] * (count - 1))
        self.masks.append(None if count != 1 or mask is None else self.texts.note(*mask))

    def text(self, count: int) -> str:
        """Return the text of the first `count` masks for the answer; empty if one is missing."""
        return self.texts.text(self.masks[:count]) if len(self.masks) >= count else ""


class CarryingNumbers(Carrying, array):  # type: ignore[type-arg]  # array takes no argument at run time
    """Packed logprobs with masks."""


class CarryingList(Carrying, list[Any]):
    """Logprobs in OpenAI's form with masks."""


def carrying(values: Any, texts: Texts, masks: Iterable[int | None] = ()) -> CarryingNumbers | CarryingList:
    """Return logprobs that carry masks."""
    made = CarryingNumbers("f", values) if isinstance(values, array) else CarryingList(values)
    made.texts, made.masks = texts, list(masks)
    return made


@cache
def install() -> None:
    """Make vLLM ask its workers for masks, collect them, and write them. Raises `ImportError` or `AttributeError` for a vLLM
    with other internals."""
    packed_logprobs.install()  # its collector would replace ours
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    if not {"slice_request", "sampled_token_ranks"} <= set(dir(LogprobsLists)):
        raise AttributeError("LogprobsLists has no ranks of one request")
    writers = ((OpenAIServingChat, "_create_chat_logprobs"), (OpenAIServingCompletion, "_create_completion_logprobs"))
    written = [_writing(getattr(owner, name)) for owner, name in writers]
    begin, update = LogprobsProcessor.from_new_request.__func__, LogprobsProcessor.update_from_output
    LogprobsProcessor.from_new_request = classmethod(_asking(begin))
    LogprobsProcessor.update_from_output = _collecting(update)
    for (owner, name), method in zip(writers, written, strict=True):
        setattr(owner, name, method)


def _asking(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `from_new_request` that has the workers note masks for marked requests, which vLLM sends them next."""

    @wraps(ordinary)
    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        made = ordinary(cls, tokenizer, request)
        if (budget := _wanted.get()) is not None and isinstance(made.logprobs, array | list):
            made.logprobs = carrying(made.logprobs, Texts(budget))
            request.sampling_params.extra_args = {**(request.sampling_params.extra_args or {}), ASKED: True}
        return made

    return from_new_request


def _collecting(ordinary: Callable[..., None]) -> Callable[..., None]:
    """Return an `update_from_output` that also collects the mask of a new token."""

    @wraps(ordinary)
    def update_from_output(self: Any, output: Any) -> None:
        ordinary(self, output)
        held, new = self.logprobs, output.new_logprobs
        if isinstance(held, Carrying) and new is not None and (count := len(held) - len(held.masks)):  # type: ignore[arg-type]
            held.note(count, in_front(new.sampled_token_ranks))

    return update_from_output


def _writing(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that writes logprobs as before, with the masks beside them."""

    @wraps(ordinary)
    def write(self: Any, *args: Any, **named: Any) -> Any:
        found, values = ordinary(self, *args, **named), named.get("top_logprobs")
        if isinstance(values, Carrying) and (text := values.text(len(named["token_ids"]))):
            setattr(found, packed_logprobs.BESIDE, {NAME: text})
        return found

    return write
