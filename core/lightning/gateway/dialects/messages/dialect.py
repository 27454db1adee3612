"""The dialect itself: the request, the error shapes, and counting a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from lightning.gateway.dialects.base import Translator, refuse_parameter
from lightning.gateway.dialects.messages.errors import error_object, translated
from lightning.gateway.dialects.messages.reply import MessageTranslator
from lightning.gateway.dialects.messages.request import chat_request
from lightning.gateway.dialects.translated import Translated, readable
from lightning.gateway.errors import RefusalError
from lightning.gateway.sampling import Body

IN_THE_PROMPT = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class Messages(Translated):
    """Anthropic's Messages API."""

    path = "/messages"
    id_prefix = "msg_"

    def translate(self, body: Body, before: Sequence[Body], response_id: str) -> tuple[Body, Translator | None]:
        """See `Dialect`."""
        most = body.get("max_tokens")
        if not isinstance(most, int) or most < 1:
            raise refuse_parameter("max_tokens", f"must be a positive integer, not {most!r}.")
        with readable():
            return chat_request(body), MessageTranslator(response_id)

    def refusal(self, refusal: RefusalError) -> bytes:
        """See `Dialect`."""
        return orjson.dumps(error_object(refusal.status, str(refusal)))

    def upstream_refusal(self, status: int, payload: bytes) -> bytes:
        """See `Dialect`."""
        return translated(status, payload)


def prompt_of(body: Body) -> Body:
    """What vLLM's `/tokenize` needs to count a request's prompt. Raises `RefusalError` (422)."""
    with readable():
        chat = chat_request(body)
    return {name: chat[name] for name in IN_THE_PROMPT if name in chat}
