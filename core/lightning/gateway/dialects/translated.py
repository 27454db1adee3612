"""What the dialects have in common that are asked of vLLM as chat completions.

The invariant: vLLM's own endpoints for these APIs return no token ids, so the call goes where they are returned; the
transition's id is the one the agent sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning.gateway.body import write_object
from lightning.gateway.dialects.base import Capture, Plan, refuse_parameter
from lightning.gateway.dialects.chat import plan_chat, read_chat, strip_reasoning
from lightning.gateway.errors import RefusalError
from lightning.gateway.sampling import Body


class Translated:
    """Asks for a chat completion and reads ids and logprobs from it."""

    upstream = "/chat/completions"

    def continues(self, body: Body) -> str | None:
        """See `Dialect`."""
        return None

    def plan(self, body: Body) -> Plan:
        """See `Dialect`."""
        plan = plan_chat(body)
        if plan.n != 1:
            raise refuse_parameter("n", "must be 1: an answer of this API is one. Send the request again instead.")
        return plan

    def read_reply(self, reply: Body, capture: Capture) -> None:
        """See `Dialect`."""
        read_chat(reply, capture)

    def read_chunk(self, chunk: Body, capture: Capture) -> None:
        """See `Dialect`."""
        read_chat(chunk, capture)

    def strip(self, answer: Body, plan: Plan) -> bool:
        """See `Dialect`. Of the rest the translation takes over only what the agent asked for."""
        return strip_reasoning(answer, plan)

    def exists_only_for_us(self, chunk: Body, plan: Plan) -> bool:
        """See `Dialect`. Such chunks translate to no event."""
        return False


def event(said: Body) -> bytes:
    """A server-sent event that is named after its type."""
    kind: str = said["type"]
    return b"event: " + kind.encode() + b"\ndata: " + write_object(said) + b"\n\n"


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Around reading a request: what is of another type than its API says is the agent's fault, a 422, whatever it is."""
    try:
        yield
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        message = f"Something in the request is not of the type that this API's reference gives it: {error}."
        raise RefusalError(422, "invalid_request", message) from error


def text_field(holder: Body, name: str, where: str) -> str:
    """A string an item must have. Raises `RefusalError` (422)."""
    value = holder.get(name)
    if not isinstance(value, str):
        raise refuse_parameter(f"{where}.{name}", f"must be a string, not {type(value).__name__}.")
    return value


def items_of(value: object, where: str) -> list[Body]:
    """A list of objects. Raises `RefusalError` (422)."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise refuse_parameter(where, "must be a list of objects.")
    return value
