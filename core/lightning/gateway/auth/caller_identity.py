"""Whose call is this, and which agent makes it.

The invariant: the rollout comes from a token that verified, in the order header, URL path, API key; the caller's name is
only a label, so nonsense in it costs the label and never the call. That an attempt is over is the store's to say, when it
is given a call of it: a token that it has once refused is refused here from then on, before anything is sampled.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace

import orjson
from starlette.types import Scope

from lightning.gateway.auth.api_keys import Claims, TokenSigner
from lightning.gateway.errors import Header, RefusalError
from lightning.types import Caller

log = logging.getLogger(__name__)

ROLLOUT_HEADER = b"x-lightning-rollout"
CALLER_HEADER = b"x-lightning-caller"
ALIAS = "policy:"
LONGEST_CALLER = 8192
STALE = 4096
"""Tokens of attempts that are over which are remembered at most."""
NO_RETRY: Header = (b"x-should-retry", b"false")
"""OpenAI's and Anthropic's clients send a 409 again unless they are told not to, and each time vLLM would sample for nobody."""
DEFAULT_CALLER = Caller("agent")

OURS = frozenset(
    {
        b"accept",
        b"accept-encoding",
        b"api-key",
        b"authorization",
        b"connection",
        b"content-length",
        b"content-type",
        b"cookie",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"user-agent",
        b"x-api-key",
        b"x-request-id",
    }
)
"""Headers that end at the gateway: credentials, and what belongs to one connection."""
OURS_PREFIXES = (b"x-lightning-", b"x-stainless-", b"x-forwarded-", b"openai-", b"anthropic-")


class Identity:
    """Reads tokens and callers from requests."""

    def __init__(self, signer: TokenSigner) -> None:
        self._signer = signer
        self._complained = False
        self._stale: OrderedDict[tuple[str, int, float], str] = OrderedDict()

    def claims(self, scope: Scope) -> Claims:
        """The attempt this request belongs to. Raises `RefusalError` (401)."""
        authorization = key = b""
        for name, value in scope["headers"]:
            if name == ROLLOUT_HEADER:
                return self._signer.verify(value.decode("latin-1"))
            if name == b"authorization":
                authorization = value
            elif name == b"x-api-key":
                key = value
        token = scope.get("path_params", {}).get("token")
        if token is None:
            token = bearer(authorization) or key.decode("latin-1")
        return self._signer.verify(token)

    def over(self, claims: Claims, why: object) -> RefusalError:
        """The refusal (409) of a call whose attempt the store says to be over; `check_over` raises it from now on.

        The token is remembered and not the attempt: one that the store has lost (a failover) begins again with a new token.
        """
        key = _key(claims)
        self._stale[key] = str(why)
        self._stale.move_to_end(key)
        if len(self._stale) > STALE:
            self._stale.popitem(last=False)
        return refuse_stale(why)

    def check_over(self, claims: Claims) -> None:
        """Raise `RefusalError` (409) for a token that `over` was told of."""
        why = self._stale.get(_key(claims))
        if why is not None:
            self._stale.move_to_end(_key(claims))
            raise refuse_stale(why)

    def knows(self, trace_id: str) -> bool:
        """Whether this process knows whose trace that is, without asking the store."""
        return self._signer.of_trace(trace_id) is not None

    def caller(self, scope: Scope, model: object) -> Caller:
        """Who is calling: the adapter's header, else the model's alias (`policy:writer`), else `agent`."""
        unnamed = DEFAULT_CALLER
        for name, value in scope["headers"]:
            if name == CALLER_HEADER and (found := self._parse(value)) is not None:
                if found.path or found.agent != DEFAULT_CALLER.agent:
                    return found
                unnamed = found  # from an adapter that failed: it says so in `framework`, and no name
        if isinstance(model, str) and model.startswith(ALIAS) and len(model) > len(ALIAS):
            return replace(unnamed, agent=model[len(ALIAS) :])
        return unnamed

    def _parse(self, value: bytes) -> Caller | None:
        try:
            return parse_caller(value)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if not self._complained:
                self._complained = True
                log.warning("ignoring a bad %s header (said once): %s", CALLER_HEADER.decode(), error)
            return None


def refuse_stale(why: object) -> RefusalError:
    """The refusal (409) of a call of an attempt that is over."""
    message = (
        f"This attempt of the rollout is over, its calls are no longer taken: {why}. Stop the agent; if a client is kept "
        "between rollouts, give it the new llm.api_key."
    )
    return RefusalError(409, "stale_attempt", message, [NO_RETRY])


def _key(claims: Claims) -> tuple[str, int, float]:
    """What tells tokens apart."""
    return claims.rollout, claims.attempt, claims.expires_at


def parse_caller(value: bytes) -> Caller:
    """The caller in a header: JSON with `agent` and, if known, `path`, `span_id`, `parent_id`, `framework`.

    Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` for anything else.
    """
    if len(value) > LONGEST_CALLER:
        raise ValueError(f"{len(value)} bytes; at most {LONGEST_CALLER} are read")
    said = orjson.loads(value)
    path = tuple(said.get("path") or ())
    agent, span, parent, framework = (
        said["agent"],
        *(said.get(name) or "" for name in ("span_id", "parent_id", "framework")),
    )
    if not agent or not all(isinstance(text, str) for text in (agent, span, parent, framework, *path)):
        raise ValueError("'agent' must be a non-empty string, 'path' a list of strings, the rest strings")
    return Caller(agent, path, span, parent, framework)


def bearer(authorization: bytes) -> str:
    """The token of an `Authorization: Bearer` header, or an empty string."""
    scheme, _, token = authorization.decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def forwarded_headers(scope: Scope) -> list[tuple[str, str]]:
    """The agent's headers that go on to vLLM (trace context and the like); never ours, never credentials."""
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name not in OURS and not name.startswith(OURS_PREFIXES)
    ]
