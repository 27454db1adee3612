"""`POST /v1/messages/count_tokens`: how many tokens the prompt of a Messages request has.

The invariant: they are counted by the policy server's own tokenizer and chat template, over the very chat messages that
`/v1/messages` would send. Nothing is sampled, so nothing is recorded.
"""

from __future__ import annotations

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from lightning.config.sections import GatewayConfig
from lightning.gateway.auth.caller_identity import Identity
from lightning.gateway.body import ClientGoneError, read_body, read_object
from lightning.gateway.dialects.messages.dialect import Messages, prompt_of
from lightning.gateway.errors import JSON_TYPE, RefusalError, UpstreamError, send_bytes
from lightning.gateway.policy_registry import Policies
from lightning.gateway.upstream.client import Forwarder

PATH = f"{Messages.path}/count_tokens"
UNANSWERED = (aiohttp.ClientError, TimeoutError, OSError, UpstreamError)
"""What asking a policy server raises when it does not answer as itself."""


class CountTokens:
    """The ASGI application behind the route."""

    def __init__(self, config: GatewayConfig, identity: Identity, policies: Policies, forwarder: Forwarder) -> None:
        self._config, self._identity, self._policies, self._forwarder = config, identity, policies, forwarder
        self._dialect = Messages()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Never raises for what is the agent's or vLLM's fault."""
        try:
            status, body = await self._count(scope, receive)
            await send_bytes(send, status, body)
        except RefusalError as refusal:
            await send_bytes(send, refusal.status, self._dialect.refusal(refusal), (JSON_TYPE, *refusal.headers))
        except ClientGoneError:
            return

    async def _count(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        claims = self._identity.claims(scope)
        policy = self._policies.of(claims.run)
        prompt = prompt_of(read_object(await read_body(scope, receive, self._config.max_body_bytes)))
        try:
            status, payload = await self._forwarder.tokenize(policy, claims.rollout, prompt)
            if status != 200:
                return status, self._dialect.upstream_refusal(status, payload)
            return 200, orjson.dumps({"input_tokens": orjson.loads(payload)["count"]})
        except (*UNANSWERED, orjson.JSONDecodeError, KeyError, TypeError) as error:
            message = f"The policy server did not count the tokens ({error!r}). Ask again."
            raise RefusalError(502, "upstream_failed", message) from error
