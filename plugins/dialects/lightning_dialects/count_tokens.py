"""Count the tokens of a Messages API request.

The invariant: the counted prompt is the one that the call itself would have. Nothing is sampled, so nothing is recorded except
the refusal of a stage that answers in place of the policy.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import orjson
from lightning.gateway.http import (
    JSON_TYPE,
    Body,
    ClientGoneError,
    RefusalError,
    beside,
    read_body,
    read_object,
    send_bytes,
)
from lightning.gateway.stages import recording_refusals
from lightning.gateway.upstream import UNANSWERED

from lightning_dialects.chat_template import prompt_of
from lightning_dialects.messages import Messages, chat_request
from lightning_dialects.translated import readable

if TYPE_CHECKING:
    from lightning.gateway.calls import Parts
    from lightning.gateway.identity import Claims
    from starlette.types import Receive, Scope, Send

ROUTE = "messages/count_tokens"


class CountTokens:
    """`POST /v1/messages/count_tokens`: count a prompt's tokens with the policy server's tokenizer and chat template, from the
    same chat messages that `/v1/messages` would send."""

    def __init__(self, parts: Parts) -> None:
        self._config, self._identity, self._policies = parts.config, parts.identity, parts.policies
        self._forwarder, self._parts = parts.forwarder, parts
        self._dialect = Messages(parts.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Faults of the agent or of vLLM become error responses and raise nothing."""
        try:
            claims = self._identity.claims(scope)
            self._identity.check_over(claims)
            payload = await read_body(scope, receive, self._config.max_body_bytes)
            body = await beside(scope, partial(read_object, payload))
            async with recording_refusals(self._parts, claims, scope, send) as passed:
                pass_on = self._parts.line.elsewhere(ROUTE, body.get("model"), rollout=claims.rollout)
                if pass_on is not None:
                    await pass_on(payload, scope, receive, passed)
                    return
            with readable():
                chat = chat_request(body)
            status, answer = await self._count(claims, chat)
            await send_bytes(send, status, answer)
        except RefusalError as refusal:
            await send_bytes(send, refusal.status, self._dialect.refusal(refusal), (JSON_TYPE, *refusal.headers))
        except ClientGoneError:
            return

    async def _count(self, claims: Claims, chat: Body) -> tuple[int, bytes]:
        policy = self._policies.of(claims.run)
        tokenize = partial(self._forwarder.tokenize, policy, claims.rollout, None)
        try:
            await self._dialect.fit(chat, policy, tokenize, None)
            with readable():
                prompt = prompt_of(chat)
            status, payload = await tokenize(prompt)
            if status != 200:
                return status, self._dialect.upstream_refusal(status, payload)
            count = orjson.loads(payload)["count"]
            said = {"input_tokens": count, "context_management": {"original_input_tokens": count}}
            return 200, orjson.dumps(said)
        except (*UNANSWERED, orjson.JSONDecodeError, KeyError, TypeError) as error:
            message = f"The policy server did not count the tokens ({error!r}). Ask again."
            raise RefusalError(502, "upstream_failed", message) from error
