"""Who may ask this port at all, and how often: what stands before every route.

The invariant: no token can take more than its share of requests, and nobody learns anything by trying tokens quickly, nor can
that keep a good token, an open path or the share of one that is known from anybody; what is remembered of clients is bounded,
and holds none of their secrets. A request costs three look-ups in dictionaries.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning.addresses import is_loopback
from lightning.config import LimitsConfig
from lightning.gateway.http import JSON_TYPE, RefusalError, send_bytes
from lightning.gateway.identity import KEYS, ROLLOUT_HEADER, bearer, keys_in
from lightning.gateway.request_body import KEY, RequestBody
from lightning.memory_budget import Budget, Holder

KeyOf = Callable[[Sequence[str]], str]
CLIENTS = 16_384
"""Tokens and addresses that are remembered at most."""
CREDENTIALS = frozenset({b"authorization", *KEYS, ROLLOUT_HEADER})
OPEN = frozenset({"/health", "/api/v1/health", "/api/v1/openapi.json"})
"""The paths that need no token, so that an answer there says nothing of one."""


@dataclass(slots=True)
class Share:
    """What is left to one client: `allowance` of `most` requests at the time `at` (the monotonic clock), and what the bodies
    of its requests hold. `good` tokens were let in before."""

    most: float
    allowance: float
    at: float
    bodies: Holder
    in_flight: int = 0
    good: bool = False

    def wait(self, rate: float, now: float) -> float:
        """The seconds until a request is left, of `rate` (not 0) per second and at most `most` at once; 0 for now."""
        self.allowance = min(self.most, self.allowance + (now - self.at) * rate)
        self.at = now
        return 0.0 if self.allowance >= 1.0 else (1.0 - self.allowance) / rate


class Shares:
    """The shares of those who asked lately. The one that asked longest ago is forgotten first, unless it still waits."""

    def __init__(self, most: float, budget: Budget) -> None:
        self._most, self._budget = most, budget
        self._known: OrderedDict[bytes, Share] = OrderedDict()

    def get(self, client: bytes) -> Share | None:
        """The share of a client that is remembered."""
        share = self._known.get(client)
        if share is not None:
            self._known.move_to_end(client)
        return share

    def of(self, client: bytes, now: float) -> Share:
        """The share of a client."""
        share = self.get(client)
        if share is None:
            share = Share(self._most, self._most, now, Holder(self._budget))
            self.keep(client, share)
        return share

    def keep(self, client: bytes, share: Share) -> None:
        """Remember a share."""
        self._known[client] = share
        self._known.move_to_end(client)
        if len(self._known) > CLIENTS:
            oldest = next(iter(self._known))
            if self._known[oldest].in_flight:
                self._known.move_to_end(oldest)
            else:
                del self._known[oldest]

    def drop(self, client: bytes) -> None:
        """Forget a share, if it is remembered."""
        self._known.pop(client, None)

    def __len__(self) -> int:
        return len(self._known)


class Guard:
    """An ASGI application before another one. `loopback` says that the port is bound to this machine alone, `key_of` which of
    several API keys in one request the application looks at (the first, unless it says otherwise)."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig, *, loopback: bool, key_of: KeyOf | None = None) -> None:
        self._key_of = key_of or (lambda keys: next(iter(keys), ""))
        self._app, self._limits = app, limits
        self._hosts = frozenset(host.lower() for host in limits.hosts)
        self._loopback, self._checks_host = loopback, loopback or bool(limits.hosts)
        self._rate, self._failures = limits.requests_per_second, limits.failures_per_minute / 60.0
        self._budget = Budget(limits.body_memory)
        self._tokens, self._untried = Shares(2.0 * self._rate, self._budget), Shares(2.0 * self._rate, self._budget)
        # Apart, so that any number of tokens that open nothing makes nobody forget one that does.
        self._strangers = Shares(limits.failures_per_minute, self._budget)
        self._is_ours = lru_cache(256)(self._means_us)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or say why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            client, token, address = self._admit(scope)
        except RefusalError as refusal:
            await send_bytes(send, refusal.status, refusal.body, [JSON_TYPE, *refusal.headers])
            return
        token.in_flight += 1
        scope[KEY] = body = RequestBody(self._budget, token.bodies, self._limits.json_values, receive)
        if scope["path"].startswith("/api/"):
            body.is_no_call()
        try:
            if token.good:
                await self._app(scope, body.receive, send)
            else:
                await self._app(scope, body.receive, self._judging(scope, send, client, token, address))
        finally:
            token.in_flight -= 1
            body.close()

    def close(self) -> None:
        """Let go of what it works with, once the last request has been answered."""
        self._budget.close()

    def _admit(self, scope: Scope) -> tuple[bytes, Share, Share]:
        """The token's name here (none without one), and the shares of the token and of the address.

        Raises `RefusalError`: 421 for a wrong name, 400 for two tokens, 429.
        """
        host, sent = b"", {}
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name in CREDENTIALS:
                if name in sent:
                    raise RefusalError(400, "two_tokens", f"The request has two headers {name.decode()}; send one.")
                sent[name] = value
        if host and self._checks_host and not self._is_ours(host):
            text = (
                f"This server is not called {host.decode('latin-1')[:200]!r}; name it in gateway.limits.hosts if it is."
            )
            raise RefusalError(421, "wrong_host", text)
        credential = self._credential(scope["path"], sent)
        where = (scope["client"] or ("",))[0].encode()
        client = hashlib.blake2b(credential, digest_size=16).digest() if credential else b""
        now = time.monotonic()
        token = self._tokens.get(client) or self._untried.of(client or where, now)
        address = self._strangers.of(where, now)
        limit = self._limits.concurrent_requests
        if limit and token.in_flight >= limit:
            raise _too_many(f"This token has {limit} requests in progress (gateway.limits.concurrent_requests)", 1.0)
        if self._rate and (wait := token.wait(self._rate, now)):
            rate = f"{self._rate:g} requests per second (gateway.limits.requests_per_second)"
            raise _too_many(f"This token asks more often than {rate}", wait)
        token.allowance -= 1.0
        return client, token, address

    def _judging(self, scope: Scope, send: Send, client: bytes, token: Share, address: Share) -> Send:
        """`send`, with an eye on the answer: a token that opens something is good, one that does not costs its address.

        An address that has nothing left is told of its wrong tokens with 429. The request is asked all the same, since a good
        token from there, such as that of another machine behind one proxy, is to be let in.
        """
        refused = False

        async def judge(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                if message["status"] == 401 and self._failures:
                    if wait := address.wait(self._failures, time.monotonic()):
                        refused = True
                        refusal = _too_many("Too many requests with wrong tokens came from this address", wait)
                        await send_bytes(send, refusal.status, refusal.body, [JSON_TYPE, *refusal.headers])
                        return
                    address.allowance -= 1.0
                elif client and message["status"] < 400 and scope["path"] not in OPEN:
                    token.good = True
                    self._untried.drop(client)
                    self._tokens.keep(client, token)
            if not refused:
                await send(message)

        return judge

    def _means_us(self, host: bytes) -> bool:
        """Whether a request may be for this name: one of loopback's, or one that was given. Pages of other sites, whose names
        were pointed here, are not (DNS rebinding)."""
        name = host.decode("latin-1").lower()
        if not name.endswith("]"):
            before, colon, port = name.rpartition(":")
            name = before if colon and port.isdecimal() else name
        return name in self._hosts or (self._loopback and is_loopback(name.strip("[]")))

    def _credential(self, path: str, sent: Mapping[bytes, bytes]) -> bytes:
        """The token that the route will look at, in its order and as it reads it: neither a header that it ignores nor a space
        that it strips must make another client of one. Empty where there is none."""
        if path.startswith("/api/"):
            return bearer(sent.get(b"authorization", b"")).encode("latin-1")
        if ROLLOUT_HEADER in sent:
            return sent[ROLLOUT_HEADER]
        if path.startswith("/r/"):
            return path.split("/", 3)[2].encode("utf-8", "surrogatepass")
        return self._key_of(keys_in(sent)).encode("latin-1")


def _too_many(what: str, seconds: float) -> RefusalError:
    wait = str(max(1, math.ceil(seconds))).encode()
    return RefusalError(429, "too_many_requests", f"{what}. Wait and send it again.", [(b"retry-after", wait)])
