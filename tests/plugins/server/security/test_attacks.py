"""The table of attacks.md: each attack is tried against a real port, and must get what the table says.

After every attack the store holds exactly what it held before, unless the row says otherwise, and the server still serves.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import zstandard
from lightning.gateway.identity import TokenSigner
from lightning.types import EXPIRED, Scope
from lightning_server import auth
from lightning_server.api.app import routes
from lightning_server.auth import digest_of
from lightning_server.tokens import revoke_token

from .conftest import house_of

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
REWARD = {"outcome": {"reward": 1.0}}
House = Any
"""The fixture `house` of this folder's conftest."""
Got = httpx.Response | bytes | str
Attack = Callable[[House], Awaitable[Got]]
ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Register a row of the table."""

    def register(function: Attack) -> Attack:
        assert name not in ATTACKS, "two rows have one name"
        ATTACKS[name] = function
        return function

    return register


def got(answer: Got) -> str:
    """An answer as the table says it: its status, and the word of its error."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, bytes):
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head:
            return "connection closed"
        status, text = head.split()[1].decode(), body.decode(errors="replace")
    else:
        status, text = str(answer.status_code), answer.text
    found = re.search(r'"(?:code|type)":\s*"(\w+)"(?!.*"code":)', text, re.DOTALL)
    return f"{status} {found[1]}" if found and int(status) >= 400 else status


# tokens -------------------------------------------------------------------------------------------------------------
@attack("no token")
async def _(house: House) -> Got:
    return await house.api("GET", "/runs")


@attack("a forged secret for a token that exists")
async def _(house: House) -> Got:
    plain = house.tokens["admin"]
    return await house.api("GET", "/tokens", plain[:-4] + ("AAAA" if plain[-4:] != "AAAA" else "BBBB"))


@attack("a token that was never made")
async def _(house: House) -> Got:
    return await house.api("GET", "/tokens", f"lt_{'0' * 16}_{'A' * 43}")


@attack("a token's digest in place of its secret")
async def _(house: House) -> Got:
    identity, secret = house.tokens["admin"].split("_", 2)[1:]
    return await house.api("GET", "/tokens", f"lt_{identity}_{digest_of(secret)[:43]}")


@attack("an expired token")
async def _(house: House) -> Got:
    return await house.api("GET", "/runs", "expired")


@attack("a token replayed after it was revoked")
async def _(house: House) -> Got:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "CACHE_SECONDS", 0.0)  # the second in which servers may still believe it is over
        await revoke_token(house.store, house.tokens["trainer"].split("_")[1])
        house.changed = True
        return await house.api("POST", "/runs", "trainer", {"id": "mine", "name": "mine"})


@attack("a token in the query")
async def _(house: House) -> Got:
    return await house.api("GET", f"/runs?token={house.tokens['admin']}")


@attack("two tokens in one request")
async def _(house: House) -> Got:
    token = f"authorization: Bearer {house.tokens['viewer']}\r\n".encode()
    return await house.raw(
        b"GET /api/v1/runs HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + token * 2 + b"\r\n"
    )


# scopes -------------------------------------------------------------------------------------------------------------
@attack("a viewer leases work")
async def _(house: House) -> Got:
    return await house.api("POST", "/leases", "viewer", {"run": "run", "worker": "v"})


@attack("a viewer sets a reward")
async def _(house: House) -> Got:
    return await house.api("POST", "/rollouts/run%2F0/attempts/1/complete", "viewer", REWARD)


@attack("a runner invents a model call")
async def _(house: House) -> Got:
    return await house.api("POST", "/transitions", "runner", {"transitions": []})


@attack("a runner makes a rollout of its own")
async def _(house: House) -> Got:
    return await house.api("POST", "/rollouts", "runner", {"rollouts": []})


@attack("a runner commits a training step")
async def _(house: House) -> Got:
    return await house.api("POST", "/steps", "runner", {})


@attack("a runner moves the alias `production`")
async def _(house: House) -> Got:
    return await house.api("PUT", "/resources/writer/aliases/production", "runner", {"version": 1})


@attack("a trainer makes itself an admin")
async def _(house: House) -> Got:
    token, _ = auth.issue_token(Scope.ADMIN)
    body = {"id": token.id, "scope": "admin", "digest": token.digest}
    return await house.api("POST", "/tokens", "trainer", body)


@attack("an admin of one project makes an admin of all")
async def _(house: House) -> Got:
    token, _ = auth.issue_token(Scope.ADMIN, "*")
    body = {"id": token.id, "scope": "admin", "digest": token.digest, "project": "*"}
    return await house.api("POST", "/tokens", "own admin", body)


# rewards ------------------------------------------------------------------------------------------------------------
@attack("a reward for a rollout that nobody leased")
async def _(house: House) -> Got:
    return await house.api("POST", "/rollouts/run%2F1/attempts/1/complete", "runner", REWARD)


@attack("a reward for a future attempt")
async def _(house: House) -> Got:
    return await house.api("POST", "/rollouts/run%2F0/attempts/2/complete", "runner", REWARD)


@attack("a reward that is not a number")
async def _(house: House) -> Got:
    return await house.api("POST", "/rollouts/run%2F0/attempts/1/complete", "runner", b'{"outcome": {"reward": NaN}}')


@attack("a reward without a single model call")
async def _(house: House) -> Got:
    answer = await house.api("POST", "/rollouts/run%2F0/attempts/1/complete", "runner", REWARD)
    house.changed = True
    said = answer.json()
    return f"{answer.status_code}, {said['status']}, reward {said.get('reward')}"


# the agent's key ----------------------------------------------------------------------------------------------------
@attack("the agent's key at the control API")
async def _(house: House) -> Got:
    return await house.api("POST", "/rollouts/run%2F0/attempts/1/complete", house.agent.api_key, REWARD)


@attack("a runner's token as the agent's key")
async def _(house: House) -> Got:
    return await house.chat("runner")


@attack("an agent's key without a signature (`alg: none`)")
async def _(house: House) -> Got:
    claims = jwt.decode(house.agent.api_key, options={"verify_signature": False})
    return await house.chat(jwt.encode({**claims, "sub": "run/1"}, "", algorithm="none"))


@attack("an agent's key rewritten for another rollout")
async def _(house: House) -> Got:
    head, claims, signature = house.agent.api_key.split(".")
    text = base64.urlsafe_b64decode(claims + "==").replace(b"run/0", b"run/1")
    return await house.chat(f"{head}.{base64.urlsafe_b64encode(text).decode().rstrip('=')}.{signature}")


@attack("an agent's key signed with another secret")
async def _(house: House) -> Got:
    return await house.chat(TokenSigner(b"another secret, of an attacker").issue("run/1", 1, 600.0))


@attack("an agent's key in another spelling")
async def _(house: House) -> Got:
    return await house.chat(f"{house.agent.api_key}=")


@attack("an agent's expired key")
async def _(house: House) -> Got:
    house.changed = True  # by the note that the agent has outlived its key, in its own attempt: nothing was sampled
    refused = await house.chat(house.gateway.issue("run/0", 1, ttl=-1.0, run="run"))
    (noted,) = await house.store.transitions("run/0", 1)
    assert (noted.status, noted.finish_reason) == ("error", EXPIRED)
    assert not noted.prompt_ids
    assert not noted.response_ids
    return refused


@attack("an agent's key of an attempt that was superseded")
async def _(house: House) -> Got:
    await house.store.release("default::w")
    await house.store.lease("run", "another", limit=1)
    house.changed = True
    return await house.chat(house.agent.api_key)


@attack("the same, in a stream")
async def _(house: House) -> Got:
    await house.store.release("default::w")
    await house.store.lease("run", "another", limit=1)
    house.changed = True
    answer = await house.chat(house.agent.api_key, {**CHAT, "stream": True})
    assert "[DONE]" not in answer.text
    assert '"finish_reason":"stop"' not in answer.text
    assert [await house.store.transitions("run/0", attempt) for attempt in (1, 2)] == [[], []]
    last = answer.text.strip().split("\n\n")[-1]
    return f"{answer.status_code}, ended by {got(httpx.Response(409, text=last))}, nothing recorded"


@attack("the same again")
async def _(house: House) -> Got:
    await house.store.release("default::w")
    await house.store.lease("run", "another", limit=1)
    house.changed = True
    await house.chat(house.agent.api_key)
    sampled = len(house.fake.requests)
    answer = await house.chat(house.agent.api_key, {**CHAT, "stream": True})
    assert len(house.fake.requests) == sampled == 1
    return f"{got(answer)}, nothing sampled"


@attack("the policy server's admin routes, through the gateway")
async def _(house: House) -> Got:
    return await house.ask("POST", "/v1/load_lora_adapter", house.agent.api_key, {"lora_path": "/etc"})


# projects -----------------------------------------------------------------------------------------------------------
@attack("a run of another project")
async def _(house: House) -> Got:
    return await house.api("GET", "/runs/theirs", "trainer")


@attack("a rollout of another project")
async def _(house: House) -> Got:
    return await house.api("GET", "/rollouts/theirs%2F0", "trainer")


@attack("a reward for a rollout of another project")
async def _(house: House) -> Got:
    return await house.api("POST", "/rollouts/theirs%2F0/attempts/1/complete", "trainer", REWARD)


@attack("work of another project")
async def _(house: House) -> Got:
    answer = await house.api("POST", "/leases", "runner", {"run": "theirs", "worker": "w", "limit": 9})
    return str(answer.status_code)


@attack("returning a lease of a worker of the same name in another project")
async def _(house: House) -> Got:
    answer = await house.api("POST", "/leases/release", "stranger", {"worker": "w"})
    house.changed = True
    (first, _) = (await house.store.list_rollouts("run")).items
    return f"{answer.status_code}, ours are still {first.status.value}"


@attack("a resource of another project, by its stored name")
async def _(house: House) -> Got:
    return await house.api("GET", "/resources/project::theirs::planner/versions/1", "trainer")


@attack("a step that trains another project's rollout")
async def _(house: House) -> Got:
    body = {
        "run": "run", "step": 0, "policy_version": 1, "rollouts": [["theirs/0", 1]], "digests": ["d"], "digest": "d",
    }  # fmt: skip
    return await house.api("POST", "/steps", "trainer", body)


@attack("the secret that signs agents' keys, asked for by an admin")
async def _(house: House) -> Got:
    answer = await house.api("GET", "/state/gateway_secret", "admin")
    return f"{answer.status_code}, value {answer.json().get('value')}" if answer.status_code == 200 else answer


@attack("the secret that signs agents' keys, replaced by an admin")
async def _(house: House) -> Got:
    return await house.api("PUT", "/state/gateway_secret", "admin", {"value": "00" * 32})


@attack("a trainer registers a policy server of its own")
async def _(house: House) -> Got:
    return await house.api("PUT", "/state/policy%2Frun", "trainer", {"value": {"servers": [["http://evil", "m"]]}})


# what is written ----------------------------------------------------------------------------------------------------
@attack("SQL in an id")
async def _(house: House) -> Got:
    return await house.api("GET", "/runs/x'%20OR%20'1'='1'%20--", "trainer")


@attack("SQL in a cursor")
async def _(house: House) -> Got:
    return await house.api("GET", "/runs/run/rollouts?cursor=1;DROP%20TABLE%20rollouts", "trainer")


@attack("a NUL byte in a path")
async def _(house: House) -> Got:
    return await house.api("GET", "/rollouts/run%2F0%00", "trainer")


@attack("a NUL byte in an id")
async def _(house: House) -> Got:
    return await house.api("POST", "/runs", "trainer", {"id": "a\0b", "name": "x"})


@attack("bytes that are no UTF-8 in a path")
async def _(house: House) -> Got:
    return await house.api("GET", "/rollouts/%ff%fe", "trainer")


@attack("climbing out of the API's paths")
async def _(house: House) -> Got:
    return await house.raw(
        b"GET /api/v1/../../../../etc/passwd HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"authorization: Bearer " + house.tokens["admin"].encode() + b"\r\n\r\n"
    )


@attack("climbing in a resource's name")
async def _(house: House) -> Got:
    return await house.api("GET", "/resources/..%2f..%2f..%2fetc%2fpasswd/versions/1", "trainer")


@attack("JSON nested 40,000 deep, at the control API")
async def _(house: House) -> Got:
    return await house.api("PUT", "/state/x?run=run", "trainer", b'{"value":' + b"[" * 40_000 + b"]" * 40_000 + b"}")


@attack("JSON nested 40,000 deep, at the gateway")
async def _(house: House) -> Got:
    return await house.chat(house.agent.api_key, b'{"messages":' + b"[" * 40_000 + b"]" * 40_000 + b"}")


@attack("JSON nested 900 deep, at the gateway")
async def _(house: House) -> Got:
    return await house.chat(house.agent.api_key, b'{"x":' + b"[" * 900 + b"]" * 900 + b"}")


@attack("a field that does not exist")
async def _(house: House) -> Got:
    return await house.api("POST", "/leases", "runner", {"run": "run", "worker": "w", "admin": True})


@attack("a body above the limit, with its length")
async def _(house: House) -> Got:
    return await house.raw(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 99999999999\r\n"
        b"authorization: Bearer " + house.agent.api_key.encode() + b"\r\n\r\n"
    )


@attack("a body above the limit, in chunks")
async def _(house: House) -> Got:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n"
        b"authorization: Bearer " + house.agent.api_key.encode() + b"\r\n\r\n"
    )
    return await house.raw(head, *[b"8000\r\n" + b"x" * 0x8000 + b"\r\n"] * 8)


@attack("20 MB of zeros in 20 kB of gzip, as spans")
async def _(house: House) -> Got:
    bomb = gzip.compress(b"\0" * 20_000_000)
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    return await house.ask("POST", "/v1/traces", house.agent.api_key, bomb, headers)


@attack("16 MB of spans in 50 kB of gzip, without a token")
async def _(house: House) -> Got:
    span = b'{"traceId": "%s", "spanId": "00f067aa0ba902b7", "name": "%s"}' % (b"a" * 32, b"x" * 16_000)
    spans = b'{"resourceSpans": [{"scopeSpans": [{"spans": [%s]}]}]}' % b", ".join([span] * 1000)
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    async with house_of() as other:
        return await other.ask("POST", "/v1/traces", body=gzip.compress(spans), headers=headers)


@attack("20 MB of spaces in 1 kB of zstd, as a call")
async def _(house: House) -> Got:
    bomb = zstandard.compress(b" " * 20_000_000)
    return await house.ask("POST", "/v1/chat/completions", house.agent.api_key, bomb, {"content-encoding": "zstd"})


@attack("20 MB of spaces in 1 kB of zstd, at the control API")
async def _(house: House) -> Got:
    bomb = zstandard.compress(b" " * 20_000_000)
    headers = {"content-encoding": "zstd"}
    return await house.ask("POST", "/api/v1/leases", house.tokens["runner"], bomb, headers)


# the connection -----------------------------------------------------------------------------------------------------
@attack("headers sent a byte at a time")
async def _(house: House) -> Got:
    return await house.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n", *[b"x: y\r\n"] * 40, pause=0.02)


@attack("a body that never comes")
async def _(house: House) -> Got:
    return await house.raw(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"
        b"authorization: Bearer " + house.agent.api_key.encode() + b"\r\n\r\n{"
    )


@attack("headers without end")
async def _(house: House) -> Got:
    return await house.raw(b"GET /health HTTP/1.1\r\n", *[b"x: " + b"y" * 20_000 + b"\r\n"] * 6)


@attack("a line end in a path, to add a header")
async def _(house: House) -> Got:
    answer = await house.api("GET", "/runs/x%0d%0aset-cookie:%20a=b", "trainer")
    assert "set-cookie" not in answer.headers
    return answer


@attack("a line end in a caller's name, to add a header")
async def _(house: House) -> Got:
    name = '{"agent": "a\\r\\nset-cookie: a=b"}'
    answer = await house.chat(house.agent.api_key, **{"x-lightning-caller": name})
    assert "set-cookie" not in answer.headers
    house.changed = True
    return answer


@attack("a second request hidden in the first's body (length and chunks)")
async def _(house: House) -> Got:
    return await house.raw(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
        b"0\r\n\r\nGET /api/v1/tokens HTTP/1.1\r\nhost: localhost\r\n\r\n"
    )


@attack("a page of another site whose name points here (DNS rebinding)")
async def _(house: House) -> Got:
    return await house.ask("GET", "/health", headers={"host": "evil.example"})


@attack("a CORS preflight of another site")
async def _(house: House) -> Got:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = await house.ask("OPTIONS", "/api/v1/runs", headers=headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]
    return answer


@attack("the server as a proxy to another host")
async def _(house: House) -> Got:
    return await house.raw(b"CONNECT evil.example:443 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")


@attack("a model name that is a URL")
async def _(house: House) -> Got:
    answer = await house.chat(
        house.agent.api_key, {**CHAT, "model": "http://169.254.169.254/v1", "base_url": "http://evil"}
    )
    house.changed = True
    assert len(await house.store.transitions("run/0")) == 1, "the run's own policy server answered"
    return f"{answer.status_code}, by the run's own policy server"


@attack("one wrong token after the other")
async def _(house: House) -> Got:
    for number in range(10_000):
        last = await house.api("GET", "/runs", f"lt_{number:016x}_{'A' * 43}")
        if last.status_code != 401:
            break
    assert number >= 30
    assert int(last.headers["retry-after"]) >= 1
    return last


# the table ----------------------------------------------------------------------------------------------------------
def table() -> dict[str, str]:
    """The attacks of attacks.md, each with its answer; a row has those that got the same."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (Path(__file__).parent / "attacks.md").read_text(), re.MULTILINE)
    answered = [(names, result) for names, result in rows if names not in ("attacks", "---")]
    return {name: result for names, result in answered for name in names.split("; ")}


@pytest.mark.parametrize("name", list(ATTACKS))
async def test_an_attack_gets_what_the_table_says(name: str, house: House) -> None:
    before = await house.truth()
    assert (await house.api("GET", "/version", "viewer")).status_code == 200
    assert got(await ATTACKS[name](house)) == table().get(name), "what it got, and what attacks.md says"
    if not getattr(house, "changed", False):
        assert await house.truth() == before
    alive = await house.api("GET", "/version", "viewer")
    assert alive.status_code == 200, "the server still serves those it served before"


def test_the_table_has_no_row_that_is_not_tried() -> None:
    assert list(table()) == list(ATTACKS)


@pytest.mark.parametrize("place", ["authorization", "x-api-key", "x-lightning-rollout"])
async def test_the_agents_key_opens_no_route_of_the_control_api(place: str, patient_house: House) -> None:
    """Each route, with the key wherever it could be put."""
    house = patient_house
    before = await house.truth()
    opened = []
    names = {"run": "run", "rollout": "run%2F0", "attempt": "1", "name": "writer", "which": "1", "alias": "live"}
    for route in routes():
        if route.scopes is None:
            continue
        path = "/api/v1" + route.path.format(**{**names, "key": "x", "token": "x"})
        value = f"Bearer {house.agent.api_key}" if place == "authorization" else house.agent.api_key
        answer = await house.ask(route.method, path, headers={place: value}, body=b"{}")
        if answer.status_code != 401:
            opened.append((route.method, route.path, answer.status_code))
    assert opened == []
    assert await house.truth() == before
