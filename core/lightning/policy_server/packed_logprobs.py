"""Sends the logprobs of a vLLM answer as one base64 text of float32 numbers, and the token ids of a chat's prompt as one text
with a character for each id, to calls that ask for it by headers.

The invariant: the numbers are those that vLLM would have written as JSON, one for each token, in order; a call without the
headers gets the usual answer.

OpenAI's form costs a token about 75 bytes of JSON, a dictionary, two objects of pydantic and its text, which the gateway would
throw away. The ids of a prompt of 64,000 tokens cost vLLM and the gateway several milliseconds as JSON numbers; a text is
copied. `vllm serve --middleware lightning.policy_server.packed_logprobs.PackedLogprobs` installs this middleware. A vLLM
without it answers in OpenAI's form, which the gateway reads as well.
"""

from __future__ import annotations

import base64
import logging
import sys
from array import array
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

HEADER, WANTED = "x-lightning-logprobs", "packed"
IDS_HEADER = "x-lightning-token-ids"
FIRST = 0x10000
"""The character of the id 0. From here on a character is no surrogate, and all take four bytes of UTF-8."""
FIELD = "packed"
"""The field of `logprobs` that has the base64 text; the lists beside it are empty."""
BESIDE = "beside"
"""The field of `logprobs` in which middleware of plugins sends texts for their call stages, by the plugin's name."""
LOWEST = -9999.0
"""The number that vLLM writes for minus infinity."""

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

_wanted: ContextVar[bool] = ContextVar("lightning_packed_logprobs", default=False)
_ids_wanted: ContextVar[bool] = ContextVar("lightning_packed_ids", default=False)
ANSWERS = ("ChatCompletionResponse", "ChatCompletionStreamResponse")
"""The classes of vLLM with a chat prompt's ids."""
MARKS = ((_wanted, HEADER.encode()), (_ids_wanted, IDS_HEADER.encode()))


class PackedLogprobs:
    """The ASGI middleware. It marks a request that has the headers, for all code of vLLM that works for this request."""

    def __init__(self, app: App) -> None:
        self._app = app
        try:
            install()
        except (ImportError, AttributeError) as error:
            logger.warning("logprobs are sent as JSON: this vLLM is not one that they can be packed in (%r)", error)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request, marked if it has one of the headers."""
        sent = scope.get("headers", ())
        marks = [(mark, mark.set((name, WANTED.encode()) in sent)) for mark, name in MARKS]
        try:
            await self._app(scope, receive, send)
        finally:
            for mark, token in marks:
                mark.reset(token)


def pack(values: array[float]) -> str:
    """Encode float32 numbers, the lowest byte first, as base64."""
    clipped = array("f", [max(value, LOWEST) for value in values])
    if sys.byteorder == "big":
        clipped.byteswap()
    return base64.b64encode(clipped.tobytes()).decode()


def unpack(text: str) -> array[float]:
    """Decode the text of `pack`. Raises `ValueError` for any other text."""
    values = array("f", base64.b64decode(text, validate=True))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def pack_ids(ids: Sequence[int]) -> str:
    """Write token ids below 2**20 as one character each. Raises `ValueError` for another id."""
    return (np.array(ids, "<i4") + FIRST).tobytes().decode("utf-32-le")


def unpack_ids(text: str) -> array[int]:
    """Read the text of `pack_ids`. An id of any other text may be negative; raises `ValueError` for a lone surrogate."""
    ids = array("i", text.encode("utf-32-le"))
    if sys.byteorder == "big":
        ids.byteswap()
    in_place = np.frombuffer(ids, np.int32)
    in_place -= FIRST
    return ids


@cache
def install() -> None:
    """Make vLLM collect and write packed logprobs, and pack ids. Raises `ImportError` or `AttributeError` for a vLLM with other
    internals."""
    from vllm.entrypoints.openai.chat_completion import serving as chat
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.logprobs import LogprobsProcessor

    writers: tuple[tuple[Any, str, Any], ...] = (
        (OpenAIServingChat, "_create_chat_logprobs", ChatCompletionLogProbs),
        (OpenAIServingCompletion, "_create_completion_logprobs", CompletionLogProbs),
    )
    written = [_writing(getattr(owner, name), shape) for owner, name, shape in writers]
    answers = [(name, _packing_ids(getattr(chat, name))) for name in ANSWERS]
    LogprobsProcessor.from_new_request = classmethod(_collecting(LogprobsProcessor))
    for (owner, name, _), method in zip(writers, written, strict=True):
        setattr(owner, name, method)
    for name, answer in answers:
        setattr(chat, name, answer)


def _packing_ids(shape: Any) -> Any:
    """Return a class of answers, or of chunks, that packs the prompt's ids for marked requests."""

    class Packing(shape):  # type: ignore[misc]  # a class of vLLM's, known only where that is
        """An answer whose prompt's ids may be a text."""

        prompt_token_ids: list[int] | str | None = None

        def __init__(self, **given: Any) -> None:
            if (ids := given.get("prompt_token_ids")) and _ids_wanted.get():
                given["prompt_token_ids"] = pack_ids(ids)
            super().__init__(**given)

    return Packing


def _collecting(processor: Any) -> Callable[..., Any]:
    """Return a `from_new_request` that makes a collector of numbers alone for marked requests."""
    ordinary = processor.from_new_request.__func__
    if not hasattr(processor, "_update_sample_logprobs"):
        raise AttributeError("LogprobsProcessor has no _update_sample_logprobs")

    class Collector(processor):  # type: ignore[misc]  # a class of vLLM's, known only where that is
        """Keeps the logprob of each sampled token, which comes first in its row, in an array; no token is made text."""

        def _update_sample_logprobs(self, rows: Any) -> None:
            sampled = rows.logprobs[:, 0].tolist()
            self.logprobs.extend(sampled)
            self.cumulative_logprob += sum(sampled)

    @wraps(ordinary)
    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        asked = request.sampling_params
        if not _wanted.get() or asked.logprobs != 0 or asked.prompt_logprobs is not None or asked.logprob_token_ids:
            return ordinary(cls, tokenizer, request)
        made = ordinary(Collector, tokenizer, request)
        made.logprobs = array("f")
        return made

    return from_new_request


def _writing(ordinary: Callable[..., Any], shape: Any) -> Callable[..., Any]:
    """Return a method that writes logprobs as vLLM's does, and those in an array packed."""

    @wraps(ordinary)
    def write(self: Any, *args: Any, **named: Any) -> Any:
        values = named.get("top_logprobs")
        if not isinstance(values, array):
            return ordinary(self, *args, **named)
        known = values[: len(named["token_ids"])]  # vLLM, too, leaves out what is beyond a stop
        return shape.model_construct(**{FIELD: pack(known)})

    return write
