"""Whose call is this, and which agent makes it: the agent's API key, and the header that names a caller.

The invariant (law 6): the key is a signed, expiring token that names one attempt of one rollout. One that verifies gives the
right to call the model for that attempt, and no other right. It has one spelling: whoever counts by the token's text counts
each attempt once. It is looked for in the order header, URL path, API key; of several API keys (clients send what they find in
their environment beside what they were given) the one that verifies counts. The caller's name is only a label, so nonsense in
it costs the label and never the call. That an attempt is over is the store's to say, when it is given a call of it: a token
that it has once refused is refused here from then on, before anything is sampled.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import jwt
import orjson
from jwt.utils import base64url_decode, base64url_encode
from starlette.types import Scope

from lightning.bounded import Bounded, Once
from lightning.errors import ConfigError
from lightning.gateway.http import Header, RefusalError
from lightning.store.protocol import Store
from lightning.types import UNNAMED, Caller, recorded

ALGORITHM = "HS256"
AUDIENCE = "lightning-gateway"
CURE = "The agent must pass llm.api_key (or use llm.url_with_token) exactly as it was given for this rollout."
LONGEST_TOKEN = 4096
CACHE_SIZE = 4096
SHORTEST_SECRET = 16
AS_ASKED: Mapping[str, float | int] = MappingProxyType({})
"""The sampling of a token that overrides nothing; one for all of them, since thousands are remembered."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says. `sampling` overrides the agent's parameters for this attempt; `expires_at` is Unix time.

    `run` says whose policy is called; empty: that of the gateway itself. `session` is the run in which each conversation with
    this key becomes a rollout of its own; empty for the key of one attempt. `branch`: the rollout has a parent, from whose
    record its first calls are answered.
    """

    rollout: str
    attempt: int
    expires_at: float
    sampling: Mapping[str, float | int] = field(default_factory=lambda: AS_ASKED)
    run: str = ""
    session: str = ""
    branch: bool = False


KeyWatcher = Callable[[str, Claims, bool], None]
"""Is told of a key and its claims: True where the key is issued here, False where a request brings it and it is new here."""


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
        self._verified = Bounded[str, Claims](CACHE_SIZE)
        self.watchers: list[KeyWatcher] = []

    def issue(
        self,
        rollout: str,
        attempt: int,
        ttl: float,
        sampling: Mapping[str, float | int] | None = None,
        run: str = "",
        session: str = "",
        *,
        branch: bool = False,
    ) -> str:
        """Sign a token that is valid for `ttl` seconds; it contains only letters, digits, `-`, `_` and dots."""
        expires_at = time.time() + ttl
        said = {"aud": AUDIENCE, "sub": rollout, "att": attempt, "exp": expires_at}
        more = {"smp": dict(sampling or {}), "run": run, "ses": session, "br": branch}  # what is empty is left out
        said |= {name: value for name, value in more.items() if value}
        token = jwt.encode(said, self._key, algorithm=ALGORITHM)
        self._tell(token, Claims(rollout, attempt, expires_at, sampling or AS_ASKED, run, session, branch), issued=True)
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
        self._verified.keep(token, claims)
        self._tell(token, claims, issued=False)
        return claims

    def _tell(self, token: str, claims: Claims, *, issued: bool) -> None:
        for watcher in self.watchers:
            try:
                watcher(token, claims, issued)
            except Exception:
                log.exception("%r failed on a key of %s", watcher, claims.rollout)

    def _decode(self, token: str) -> Claims:
        if not token:
            raise RefusalError(401, "missing_token", f"No API key was sent. {CURE}")
        if len(token) > LONGEST_TOKEN:
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
            sampling, run, session = said.get("smp") or AS_ASKED, str(said.get("run", "")), str(said.get("ses", ""))
            branch = said.get("br") is True
            return Claims(said["sub"], int(said["att"]), float(said["exp"]), sampling, run, session, branch)
        except (jwt.InvalidTokenError, ValueError, TypeError) as error:
            message = f"The API key is not one of this gateway ({error}). {CURE}"
            raise RefusalError(401, "invalid_token", message) from None


async def gateway_secret(store: Store) -> bytes:
    """The secret that signs the keys of agents: one for all servers over a store, made by the first that asks.

    Raises `StoreError`.
    """
    return bytes.fromhex(str(await store.keep_state("", "gateway_secret", secrets.token_hex(32))))


def is_canonical(token: str) -> bool:
    """Whether the signature of a token that verified is spelt as base64url has it.

    PyJWT reads over padding, and its older releases over the last two bits and over characters that are none of base64's, so
    that one signature has many spellings. The rest of a token has one: the signature is of its text.
    """
    signature = token.rpartition(".")[2]
    return base64url_encode(base64url_decode(signature)).decode() == signature


log = logging.getLogger(__name__)

ROLLOUT_HEADER, CALLER_HEADER = recorded.ROLLOUT_HEADER.encode(), recorded.CALLER_HEADER.encode()
KEYS = (b"x-api-key", b"api-key")
"""Headers in which Anthropic's and Azure's clients send their key."""
MODEL = "policy"
"""The name that agents know the policy by."""
ALIAS = f"{MODEL}:"
LONGEST_CALLER = 8192
STALE = 4096
"""Tokens of attempts that are over which are remembered at most."""
NO_RETRY: Header = (b"x-should-retry", b"false")
"""OpenAI's and Anthropic's clients send a 409 again unless they are told not to, and each time vLLM would sample for nobody."""

OURS = frozenset(
    b"accept accept-encoding api-key authorization connection content-encoding content-length content-type cookie expect host "
    b"keep-alive proxy-authorization te trailer transfer-encoding upgrade user-agent x-api-key x-request-id".split()
)
"""Headers that end at the gateway: credentials, and what belongs to one connection or to the body as it came."""
OURS_PREFIXES = (b"x-lightning-", b"x-stainless-", b"x-forwarded-", b"openai-", b"anthropic-")


class Identity:
    """Reads tokens and callers from requests."""

    def __init__(self, signer: TokenSigner) -> None:
        self._signer = signer
        self._said = Once()
        self._stale = Bounded[tuple[str, int, float], str](STALE)

    def claims(self, scope: Scope) -> Claims:
        """The attempt this request belongs to. Raises `RefusalError` (401)."""
        sent = dict(scope["headers"])
        if (named := sent.get(ROLLOUT_HEADER)) is not None:
            return self._signer.verify(named.decode("latin-1"))
        token = scope.get("path_params", {}).get("token")
        return self._signer.verify(self.key_of(keys_in(sent)) if token is None else token)

    def key_of(self, keys: Sequence[str]) -> str:
        """The one of a request's API keys that counts: the first that verifies, else one that has expired, else the first."""
        expired = ""
        for key in keys if len(keys) > 1 else ():
            try:
                self._signer.verify(key)
            except ExpiredTokenError:
                expired = expired or key
            except RefusalError:
                continue
            else:
                return key
        return expired or next(iter(keys), "")

    def over(self, claims: Claims, why: object) -> RefusalError:
        """The refusal (409) of a call whose attempt the store says to be over; `check_over` raises it from now on.

        The token is remembered and not the attempt: one that the store has lost (a failover) begins again with a new token.
        """
        self._stale.keep(_key(claims), str(why))
        message = (
            f"This attempt of the rollout is over, its calls are no longer taken: {why}. Stop the agent; if a client is kept "
            "between rollouts, give it the new llm.api_key."
        )
        return RefusalError(409, "stale_attempt", message, [NO_RETRY])

    def check_over(self, claims: Claims) -> None:
        """Raise `RefusalError` (409) for a token that `over` was told of."""
        if (why := self._stale.get(_key(claims))) is not None:
            raise self.over(claims, why)

    def watch(self, watcher: KeyWatcher) -> None:
        """Tell it of every key from now on. One that raises is logged, and the key is as good as before."""
        self._signer.watchers.append(watcher)

    def caller(self, scope: Scope, model: object) -> Caller:
        """Who is calling: the adapter's header, else the model's alias (`policy:writer`), else `agent`."""
        unnamed = UNNAMED
        for name, value in scope["headers"]:
            if name == CALLER_HEADER and (found := self._parse(value)) is not None:
                if found.path or found.agent != UNNAMED.agent:
                    return found
                unnamed = found  # from an adapter that failed: it says so in `framework`, and no name
        if isinstance(model, str) and model.startswith(ALIAS) and len(model) > len(ALIAS):
            return replace(unnamed, agent=model[len(ALIAS) :])
        return unnamed

    def _parse(self, value: bytes) -> Caller | None:
        try:
            return parse_caller(value)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if self._said.first():
                log.warning("ignoring a bad %s header (said once): %s", CALLER_HEADER.decode(), error)
            return None


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
    agent, rest = said["agent"], [said.get(name) or "" for name in ("span_id", "parent_id", "framework")]
    if not agent or not all(isinstance(text, str) for text in (agent, *rest, *path)):
        raise ValueError("'agent' must be a non-empty string, 'path' a list of strings, the rest strings")
    return Caller(agent, path, *rest)


def keys_in(sent: Mapping[bytes, bytes]) -> list[str]:
    """The API keys in a request's headers, each once, in the order in which they are looked at."""
    found = [bearer(sent.get(b"authorization", b"")), *(sent.get(name, b"").decode("latin-1") for name in KEYS)]
    return [key for key in dict.fromkeys(found) if key]


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
