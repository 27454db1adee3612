"""The agent's API key: a signed, expiring token that names one attempt of one rollout and nothing else.

The invariant (law 6): a token that verifies gives the right to call the model for that attempt, and no other right. It has one
spelling: whoever counts by the token's text counts each attempt once.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import jwt
from jwt.utils import base64url_decode, base64url_encode

from lightning.errors import ConfigError
from lightning.gateway.errors import RefusalError
from lightning.spans.trace import trace_id_of

ALGORITHM = "HS256"
AUDIENCE = "lightning-gateway"
CURE = "The agent must pass llm.api_key (or use llm.url_with_token) exactly as it was given for this rollout."
LONGEST = 4096
CACHE_SIZE = 4096
TRACES = 16_384
"""Trace ids that are remembered at most, some 400 bytes each; first goes the one whose agent was silent for longest."""
SHORTEST_SECRET = 16
AS_ASKED: Mapping[str, float | int] = MappingProxyType({})
"""The sampling of a token that overrides nothing; one for all of them, since thousands are remembered."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says. `sampling` overrides the agent's parameters for this attempt; `expires_at` is Unix time.

    `run` says whose policy is called; empty: that of the gateway itself.
    """

    rollout: str
    attempt: int
    expires_at: float
    sampling: Mapping[str, float | int] = field(default_factory=lambda: AS_ASKED)
    run: str = ""


class ExpiredTokenError(RefusalError):
    """The refusal (401) of a token whose time is over; `claims` are what it said, and its signature has verified."""

    def __init__(self, claims: Claims) -> None:
        message = f"The API key of this rollout has expired; raise gateway.token_ttl if rollouts take this long. {CURE}"
        super().__init__(401, "expired_token", message)
        self.claims = claims


class TokenSigner:
    """Issues and verifies tokens. Verified ones are remembered, since an agent sends the same one with every call."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SHORTEST_SECRET:
            raise ConfigError(
                f"The gateway's signing secret has {len(secret)} bytes; use at least {SHORTEST_SECRET}: "
                "secrets.token_bytes(32)"
            )
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"lightning.gw").digest()
        self._verified: OrderedDict[str, Claims] = OrderedDict()
        self._traces: OrderedDict[str, Claims] = OrderedDict()

    def issue(
        self, rollout: str, attempt: int, ttl: float, sampling: Mapping[str, float | int] | None = None, run: str = ""
    ) -> str:
        """Sign a token that is valid for `ttl` seconds; it contains only letters, digits, `-`, `_` and dots."""
        expires_at = time.time() + ttl
        claims: dict[str, object] = {"aud": AUDIENCE, "sub": rollout, "att": attempt, "exp": expires_at}
        if sampling:
            claims["smp"] = dict(sampling)
        if run:
            claims["run"] = run
        token = jwt.encode(claims, self._key, algorithm=ALGORITHM)
        self._remember(token, Claims(rollout, attempt, expires_at, run=run))
        return token

    def verify(self, token: str) -> Claims:
        """The token's claims. Raises `RefusalError` (401) when it is missing or forged, `ExpiredTokenError` when expired."""
        known = self._verified.get(token)
        if known is not None:
            if known.expires_at > time.time():
                return known
            del self._verified[token]
            raise ExpiredTokenError(known)
        claims = self._decode(token)
        if claims.expires_at <= time.time():
            raise ExpiredTokenError(claims)
        self._verified[token] = claims
        self._remember(token, claims)  # one that was issued before this process began
        if len(self._verified) > CACHE_SIZE:
            self._verified.popitem(last=False)
        return claims

    def of_trace(self, trace_id: str) -> Claims | None:
        """Whose trace an id is; None unless this process has issued or seen a token of it that is still valid."""
        claims = self._traces.get(trace_id)
        if claims is None or claims.expires_at <= time.time():
            return None
        self._traces.move_to_end(trace_id)
        return claims

    def learn(self, trace_id: str, claims: Claims) -> Claims | None:
        """Another server issued the token of this trace; the claims, unless they have expired."""
        self._note(trace_id, claims)
        return self.of_trace(trace_id)

    def _remember(self, token: str, claims: Claims) -> None:
        self._note(trace_id_of(token), claims)

    def _note(self, trace_id: str, claims: Claims) -> None:
        self._traces[trace_id] = claims
        self._traces.move_to_end(trace_id)
        now = time.time()
        while len(self._traces) > TRACES or next(iter(self._traces.values())).expires_at <= now:
            self._traces.popitem(last=False)
            if not self._traces:
                return

    def _decode(self, token: str) -> Claims:
        if not token:
            raise RefusalError(401, "missing_token", f"No API key was sent. {CURE}")
        if len(token) > LONGEST:
            raise RefusalError(401, "invalid_token", f"The API key is not one of this gateway. {CURE}")
        try:
            said = jwt.decode(
                token,
                self._key,
                algorithms=[ALGORITHM],
                audience=AUDIENCE,
                options={
                    "require": ["exp", "sub", "att"],
                    "verify_exp": False,
                },  # `verify` looks, and says whose it was
            )
            if not is_canonical(token):
                raise jwt.InvalidTokenError("it is not spelt as it was issued")
            return Claims(
                said["sub"], int(said["att"]), float(said["exp"]), said.get("smp") or AS_ASKED, str(said.get("run", ""))
            )
        except (jwt.InvalidTokenError, ValueError, TypeError) as error:
            message = f"The API key is not one of this gateway ({error}). {CURE}"
            raise RefusalError(401, "invalid_token", message) from None


def is_canonical(token: str) -> bool:
    """Whether the signature of a token that verified is spelt as base64url has it.

    PyJWT reads over padding, and its older releases over the last two bits and over characters that are none of base64's, so
    that one signature has many spellings. The rest of a token has one: the signature is of its text.
    """
    signature = token.rpartition(".")[2]
    return base64url_encode(base64url_decode(signature)).decode() == signature


def seconds_left(token: str) -> float:
    """How long a token will still be good by this machine's clock, its signature unread; infinite for what does not say so."""
    try:
        said = jwt.decode(token, options={"verify_signature": False})
        return float(said["exp"]) - time.time()
    except (jwt.InvalidTokenError, KeyError, ValueError, TypeError):
        return math.inf
