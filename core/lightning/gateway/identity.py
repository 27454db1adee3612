"""Identifies calls: the attempt of a call by the agent's API key, and the calling agent by a header.

The invariant (law 6): the key is a signed, expiring token that names one attempt of one rollout. A valid key gives the right to
call the model for that attempt, and no other right. A key has only one spelling, so that counting by the token's text counts
each attempt once. It is looked for in a header, then in the URL's path, then among the API keys. Of several API keys the valid
one counts, because clients also send keys from their environment. The caller's name is only a label: a malformed one loses the
label, never the call. The store decides whether an attempt is over, when a call is stored. After it has refused a call, further
calls with that token are refused here before anything is sampled.
"""

from __future__ import annotations

import hashlib
import logging
import re
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
from lightning.errors import ConfigError, DataError
from lightning.gateway.http import Header, RefusalError
from lightning.store.protocol import Store
from lightning.types import REJECTED, UNNAMED, Caller, read_reason, recorded

ALGORITHM = "HS256"
AUDIENCE = "lightning-gateway"
CURE = "The agent must pass llm.api_key (or use llm.url_with_token) exactly as it was given for this rollout."
LONGEST_TOKEN = 4096
CACHE_SIZE = 4096
SHORTEST_SECRET = 16
AS_ASKED: Mapping[str, float | int] = MappingProxyType({})
"""The sampling of a token that overrides nothing. All such tokens share it, because thousands are kept."""


@dataclass(frozen=True, slots=True)
class Claims:
    """The content of a token. `sampling` overrides the agent's parameters for this attempt; `expires_at` is Unix time.

    `run` is the run whose policy is called; empty for the gateway's own policy. `session` is the run in which each conversation
    with this key becomes a rollout; empty for the key of one attempt. With `branch` the first calls are answered from the
    record of the rollout's parent. `server` is the number of the policy server that gets the attempt's calls while it is well;
    None for any.
    """

    rollout: str
    attempt: int
    expires_at: float
    sampling: Mapping[str, float | int] = field(default_factory=lambda: AS_ASKED)
    run: str = ""
    session: str = ""
    branch: bool = False
    server: int | None = None


KeyWatcher = Callable[[str, Claims, bool], None]
"""Gets a key, its claims, and whether the key was issued here (True) or came with a request for the first time (False)."""


class ExpiredTokenError(RefusalError):
    """The refusal (401) of an expired token with a valid signature; `claims` are its content."""

    def __init__(self, claims: Claims) -> None:
        message = f"The API key of this rollout has expired; raise gateway.token_ttl if rollouts take this long. {CURE}"
        super().__init__(401, "expired_token", message)
        self.claims = claims


class TokenSigner:
    """Issues and verifies tokens. Verified tokens are cached, because an agent sends the same token with every call."""

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
        server: int | None = None,
    ) -> str:
        """Return a signed token that is valid for `ttl` seconds. It has only letters, digits, `-`, `_` and dots."""
        expires_at = time.time() + ttl
        said = {"aud": AUDIENCE, "sub": rollout, "att": attempt, "exp": expires_at}
        more = {"smp": dict(sampling or {}), "run": run, "ses": session, "br": branch}  # what is empty is left out
        said |= {name: value for name, value in more.items() if value} | ({} if server is None else {"srv": server})
        token = jwt.encode(said, self._key, algorithm=ALGORITHM)
        claims = Claims(rollout, attempt, expires_at, sampling or AS_ASKED, run, session, branch, server)
        self._tell(token, claims, issued=True)
        return token

    def verify(self, token: str) -> Claims:
        """Return the claims of a token. Raises `RefusalError` (401) for a missing or forged token, `ExpiredTokenError` for an
        expired one."""
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
                },  # `verify` checks it, and gives the claims with the error
            )
            if not is_canonical(token):
                raise jwt.InvalidTokenError("it is not spelt as it was issued")
            sampling, run, session = said.get("smp") or AS_ASKED, str(said.get("run", "")), str(said.get("ses", ""))
            branch, server = said.get("br") is True, said.get("srv")
            return Claims(said["sub"], int(said["att"]), float(said["exp"]), sampling, run, session, branch, server)
        except (jwt.InvalidTokenError, ValueError, TypeError) as error:
            message = f"The API key is not one of this gateway ({error}). {CURE}"
            raise RefusalError(401, "invalid_token", message) from None


async def gateway_secret(store: Store) -> bytes:
    """Return the secret that signs agents' keys. All servers over a store have the same; the first call makes it.

    Raises `StoreError`.
    """
    return bytes.fromhex(str(await store.keep_state("", "gateway_secret", secrets.token_hex(32))))


def is_canonical(token: str) -> bool:
    """Return whether the signature of a verified token has the canonical spelling in base64url.

    PyJWT ignores padding, and older releases ignore the last two bits and foreign characters, so that a signature has many
    spellings. The rest of a token has only one, because it is signed as text.
    """
    signature = token.rpartition(".")[2]
    return base64url_encode(base64url_decode(signature)).decode() == signature


log = logging.getLogger(__name__)

ROLLOUT_HEADER, CALLER_HEADER = recorded.ROLLOUT_HEADER.encode(), recorded.CALLER_HEADER.encode()
UNTRAINED_HEADER, REJECTED_HEADER = recorded.UNTRAINED_HEADER.encode(), recorded.REJECTED_HEADER.encode()
MARKS = (b"x-lightning-untrain", b"x-lightning-reject")
"""How the headers begin that mark calls; another header that begins so is a mistake."""
LONGEST_ID = 200
"""The most characters of a call's id in a header."""
KEYS = (b"x-api-key", b"api-key")
"""The headers in which Anthropic's and Azure's clients send their API key."""
MODEL = "policy"
"""The model name that agents use for the policy."""
ALIAS = f"{MODEL}:"
LONGEST_CALLER = 8192
STALE = 4096
"""The most tokens of ended attempts that are remembered."""
NO_RETRY: Header = (b"x-should-retry", b"false")
"""The header that keeps OpenAI's and Anthropic's clients from repeating a call that was answered with 409: each repetition
would make vLLM sample in vain."""

OURS = frozenset(
    b"accept accept-encoding api-key authorization connection content-encoding content-length content-type cookie expect host "
    b"keep-alive proxy-authorization te trailer transfer-encoding upgrade user-agent x-api-key x-request-id".split()
)
"""Headers that are not sent on to vLLM: credentials, and headers about one connection or about the received body."""
OURS_PREFIXES = (b"x-lightning-", b"x-stainless-", b"x-forwarded-", b"openai-", b"anthropic-")


class Identity:
    """Reads the token and the caller of requests."""

    def __init__(self, signer: TokenSigner) -> None:
        self._signer = signer
        self._said = Once()
        self._stale = Bounded[tuple[str, int, float], str](STALE)

    def claims(self, scope: Scope) -> Claims:
        """Return the claims of a request's key. Raises `RefusalError` (401) for a request without a valid key."""
        sent = dict(scope["headers"])
        if (named := sent.get(ROLLOUT_HEADER)) is not None:
            return self._signer.verify(named.decode("latin-1"))
        token = scope.get("path_params", {}).get("token")
        return self._signer.verify(self.key_of(keys_in(sent)) if token is None else token)

    def key_of(self, keys: Sequence[str]) -> str:
        """Return which of a request's API keys counts: the first valid one, else the first expired one, else the first."""
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
        """Return the refusal (409) of a call whose attempt is over according to the store; `check_over` raises it from now on.

        The token is remembered and not the attempt, because an attempt that the store has lost in a failover begins again with
        a new token.
        """
        self._stale.keep(_key(claims), str(why))
        message = (
            f"This attempt of the rollout is over, its calls are no longer taken: {why}. Stop the agent; if a client is kept "
            "between rollouts, give it the new llm.api_key."
        )
        return RefusalError(409, "stale_attempt", message, [NO_RETRY])

    def check_over(self, claims: Claims) -> None:
        """Raise `RefusalError` (409) for a token for which `over` was called."""
        if (why := self._stale.get(_key(claims))) is not None:
            raise self.over(claims, why)

    def watch(self, watcher: KeyWatcher) -> None:
        """Call `watcher` for every new key from now on. Its exceptions are logged and have no effect on the key."""
        self._signer.watchers.append(watcher)

    def caller(self, scope: Scope, model: object) -> Caller:
        """Return the calling agent: from the adapter's header, else from the model's name (`policy:writer`), else `agent`."""
        unnamed = UNNAMED
        for name, value in scope["headers"]:
            if name == CALLER_HEADER and (found := self._parse(value)) is not None:
                if found.path or found.agent != UNNAMED.agent:
                    return found
                unnamed = found  # from an adapter that failed: `framework` says so, and there is no name
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
    """Return the parts of the claims that identify a token."""
    return claims.rollout, claims.attempt, claims.expires_at


def parse_caller(value: bytes) -> Caller:
    """Return the caller in a header's JSON, which has `agent` and, if known, `path`, `span_id`, `parent_id`, `framework`.

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


def read_marks(scope: Scope) -> tuple[str, dict[str, str]]:
    """Return why a request says that its call is not trained, empty if it does not, and the earlier calls that it says were
    rejected: the reason by the call's id. Raises `RefusalError` (400) for a mark that would have no effect."""
    untrained, rejects = "", dict[str, str]()
    try:
        for name, value in scope["headers"]:
            if not name.startswith(MARKS):
                continue
            said = value.decode("latin-1")
            if name == UNTRAINED_HEADER:
                untrained = read_reason(said, f"The header {recorded.UNTRAINED_HEADER}")
            elif name == REJECTED_HEADER:
                call, _, reason = said.strip().partition(" ")
                rejects[_checked_id(call, reason)] = read_reason(
                    reason or REJECTED, f"The reason in {recorded.REJECTED_HEADER}"
                )
            else:
                raise DataError(
                    f"There is no header {name.decode('latin-1')[:80]!r}: send {recorded.UNTRAINED_HEADER} for this call, or "
                    f"{recorded.REJECTED_HEADER} for an earlier one"
                )
    except DataError as error:
        raise RefusalError(400, "bad_mark", f"{error}.") from error
    return untrained, rejects


def _checked_id(call: str, reason: str) -> str:
    """Return the id. Raises `DataError` for one that no call has, and for several in one header: programs and proxies join
    headers of one name by commas, and a reason may have commas itself."""
    kind = re.match("[a-z]+[-_]", call)
    if "," in call or (kind is not None and f", {kind[0]}" in reason):
        raise DataError(
            f"The header {recorded.REJECTED_HEADER} names several calls: {f'{call} {reason}'!r:.200}. Send one header for each "
            "call, and where your client joins headers of one name, send them with several requests"
        )
    if not 0 < len(call) <= LONGEST_ID or not call.isascii() or not call.isprintable():
        raise DataError(
            f"The header {recorded.REJECTED_HEADER} names the call {call!r:.120}: give the `id` of an earlier reply to this "
            "attempt, such as 'chatcmpl-1a2b', and after a space the reason, if you like"
        )
    return call


def keys_in(sent: Mapping[bytes, bytes]) -> list[str]:
    """Return the API keys in a request's headers, each once, in the order in which they are tried."""
    found = [bearer(sent.get(b"authorization", b"")), *(sent.get(name, b"").decode("latin-1") for name in KEYS)]
    return [key for key in dict.fromkeys(found) if key]


def bearer(authorization: bytes) -> str:
    """Return the token of an `Authorization: Bearer` header; empty for any other header."""
    scheme, _, token = authorization.decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def forwarded_headers(scope: Scope) -> list[tuple[str, str]]:
    """Return the agent's headers that are sent on to vLLM, such as trace context; never credentials or lightning's headers."""
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name not in OURS and not name.startswith(OURS_PREFIXES)
    ]
