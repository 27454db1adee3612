"""The dialect itself: a request with its conversation so far, and the error shapes."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.gateway.dialects.base import Translator, refuse_parameter
from lightning.gateway.dialects.responses.items import messages_of
from lightning.gateway.dialects.responses.reply import ResponseTranslator
from lightning.gateway.dialects.responses.request import chat_request, namespaces
from lightning.gateway.dialects.translated import Translated, readable
from lightning.gateway.errors import RefusalError
from lightning.gateway.sampling import Body


class Responses(Translated):
    """OpenAI's Responses API."""

    path = "/responses"
    id_prefix = "resp_"

    def continues(self, body: Body) -> str | None:
        """See `Dialect`."""
        previous = body.get("previous_response_id")
        return None if previous is None else str(previous)

    def translate(self, body: Body, before: Sequence[Body], response_id: str) -> tuple[Body, Translator | None]:
        """See `Dialect`."""
        if not body.get("input"):
            raise refuse_parameter("input", "is missing or empty; send a text or a list of items.")
        instructions = body.get("instructions")
        if instructions is not None and not isinstance(instructions, str):
            raise refuse_parameter("instructions", f"must be a string, not {type(instructions).__name__}.")
        with readable():
            said = messages_of(body["input"], before)
            # Instructions hold for one response; the rest of the conversation is carried on.
            system = [{"role": "system", "content": instructions}] if instructions else []
            chat, names = chat_request(body, [*system, *said]), namespaces(body)
        return chat, ResponseTranslator(response_id, body, chat, names, said)

    def refusal(self, refusal: RefusalError) -> bytes:
        """See `Dialect`."""
        return refusal.body

    def upstream_refusal(self, status: int, payload: bytes) -> bytes:
        """See `Dialect`. vLLM's errors have OpenAI's shape."""
        return payload
