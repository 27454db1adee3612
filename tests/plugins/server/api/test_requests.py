"""What clients send: what is taken, what is refused, and that the refusal names culprit and cure."""

from __future__ import annotations

import asyncio
import base64
import gzip
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.errors import StoreError, UnavailableError
from lightning.gateway.connections import Entrance
from lightning.store.rollout_state import EXCUSED
from lightning.types import LLM, Fault, Outcome, Rollout, Status, Task, Transition, logprobs, token_ids
from lightning_server.api.app import Api, routes
from lightning_server.auth import Authenticator
from lightning_server.config import PortLimits
from lightning_server.port import Guard

from .conftest import World, connection, make_world, receiver

IDS = base64.b64encode(b"\1\0\0\0\2\0\0\0").decode()


async def test_a_rollout_from_its_creation_to_its_end(world: World) -> None:
    new = {"id": "run/1", "run": "run", "task": {"input": "q"}, "group": "g"}
    for created in (1, 0):
        answer = await world.ask("POST", "/rollouts", {"rollouts": [new]}, token="trainer")
        assert answer.json == {"created": created}
    lease = {"run": "run", "worker": "w", "limit": 5, "ttl": 60}
    held = (await world.ask("POST", "/leases", lease, token="runner")).json["leases"]
    assert [one["lease"]["rollout"]["id"] for one in held] == ["run/0", "run/1"]
    assert held[0]["llm"] == {
        "base_url": "http://gateway/v1",
        "api_key": "key of run/0",
        "model": "policy",
        "prompts": {"writer": "Write."},
        "seed": None,
        "extras": {},
    }
    renewed = await world.ask("POST", "/rollouts/run%2F0/attempts/1/renew", {"worker": "w", "ttl": 600}, token="runner")
    assert renewed.json["expires_at"] > held[0]["lease"]["expires_at"]
    call = {
        "rollout": "run/0",
        "attempt": 1,
        "seq": 0,
        "id": "c",
        "prompt_ids": IDS,
        "response_ids": IDS,
        "logprobs": "",
    }
    assert (await world.ask("POST", "/transitions", {"transitions": [call]}, token="trainer")).json == {"appended": 1}
    assert (await world.ask("POST", "/transitions", {"transitions": [call]}, token="runner")).status == 403
    target = "/rollouts/run%2F0/attempts/1/complete"
    done = await world.ask("POST", target, {"outcome": {"reward": 0.5}}, token="runner")
    assert (done.json["status"], done.json["reward"]) == ("succeeded", 0.5)
    other = await world.ask("POST", target, {"outcome": {"reward": 1.0}}, token="runner")
    assert (other.status, other.error) == (409, "stale_attempt")
    read = await world.ask("GET", "/rollouts/run%2F0/transitions", token="viewer")
    assert [item["prompt_ids"] for item in read.json["items"]] == [IDS]
    assert (await world.ask("POST", "/leases/release", {"worker": "w"}, token="runner")).json == {"released": 1}


async def test_one_id_of_two_tokens_is_of_two_requests(world: World) -> None:
    """Nobody is given what was leased to somebody else who has chosen the same words."""
    new = {"id": "run/1", "run": "run", "task": {"input": "q"}, "group": "g"}
    await world.ask("POST", "/rollouts", {"rollouts": [new]}, token="trainer")
    lease = {"run": "run", "worker": "w", "limit": 1, "ttl": 60}
    key = ((b"idempotency-key", b"1"),)
    for token, leased in (("runner", "run/0"), ("trainer", "run/1"), ("runner", "run/0")):
        (held,) = (await world.ask("POST", "/leases", lease, token=token, headers=key)).json["leases"]
        assert held["lease"]["rollout"]["id"] == leased


async def test_pages_end_where_they_should(world: World) -> None:
    for number in range(7):
        await world.store.log_metrics("run", number, {"loss": 1.0})
    seen: list[int] = []
    cursor = ""
    for _ in range(3):
        page = (await world.ask("GET", f"/runs/run/metrics?limit=3&cursor={cursor}")).json
        seen += [item["step"] for item in page["items"]]
        cursor = page["cursor"]
        await world.store.log_metrics("run", -1, {"before": 1.0})  # moves no page
    assert (seen, cursor) == ([0, 1, 2, 3, 4, 5, 6], "")


def called(attempt: int, seq: int) -> Transition:
    ids = token_ids([1, 2])
    return Transition("run/0", attempt, seq, f"{attempt}-{seq}", ids, ids, logprobs([-0.1, -0.2]))


async def test_pages_of_an_attempt_stay_with_it(world: World) -> None:
    (lease,) = await world.store.lease("run", "w")
    await world.store.append([called(1, seq) for seq in range(3)])
    first = (await world.ask("GET", "/rollouts/run%2F0/transitions?limit=2")).json
    await world.store.complete(
        "run/0", lease.attempt, Outcome(None, fault=Fault.INFRASTRUCTURE, error="the machine is gone")
    )
    (again,) = await world.store.lease("run", "w")
    await world.store.append([called(again.attempt, seq) for seq in range(4)])
    rest = (await world.ask("GET", f"/rollouts/run%2F0/transitions?limit=2&cursor={first['cursor']}")).json
    assert [(item["attempt"], item["seq"]) for item in first["items"] + rest["items"]] == [(1, 0), (1, 1), (1, 2)]
    assert rest["cursor"] == ""
    newest = (await world.ask("GET", "/rollouts/run%2F0/transitions")).json
    assert [(item["attempt"], item["seq"]) for item in newest["items"]] == [(2, seq) for seq in range(4)]


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "words"),
    [
        ("GET", "/nothing", None, 404, "openapi.json says what there is"),
        ("GET", "//api/v2/runs", None, 404, "openapi.json says what there is"),
        ("GET", "/runs/", None, 404, "openapi.json"),
        ("DELETE", "/runs/run", None, 405, "DELETE is not one of GET"),
        ("GET", "/runs/nobody", None, 404, "no run 'nobody'"),
        ("GET", "/runs/%ff", None, 400, "percent-encoded UTF-8"),
        ("GET", "/runs?limit=0", None, 400, "between 1 and 1000"),
        ("GET", "/runs?limit=10000", None, 400, "between 1 and 1000"),
        ("GET", "/runs?limit=ten", None, 400, "the parameter limit"),
        ("GET", "/runs?brief=yes", None, 400, "the parameter brief"),
        ("GET", "/runs?limit=1&limit=2", None, 400, "twice"),
        ("GET", "/runs?limmit=1", None, 400, "did you mean 'limit'"),
        ("GET", "/runs?cursor=nowhere", None, 400, "'nowhere' is not a cursor"),
        ("GET", "/rollouts/run%2F0/transitions?cursor=1", None, 400, "'1' is not a cursor"),
        ("GET", "/rollouts/run%2F0/spans?cursor=1.x", None, 400, "'x' is not a cursor"),
        ("GET", "/runs?%ff=1", None, 400, "percent-encoded"),
        ("GET", "/runs/run/rollouts?status=done", None, 400, "one of pending, running"),
        ("GET", "/runs/run/rollouts?step=99999999999999999999", None, 400, "64 bits"),
        ("GET", "/rollouts/run%2F0/attempts/one/next_seq", None, 400, "the attempt in the path"),
        ("GET", "/rollouts/nobody/spans", None, 422, "'nobody' is unknown"),
        ("GET", "/watch?run=run&timeout=nan", None, 400, "0 or more"),
        ("POST", "/leases", None, 400, "the body is not JSON"),
        ("POST", "/leases", [], 400, "an object, a LeaseRequest"),
        ("POST", "/leases", {"run": "run"}, 400, "lacks 'worker'"),
        ("POST", "/leases", {"run": "run", "worker": "w", "amount": 2}, 400, "no field 'amount'"),
        ("POST", "/leases", {"run": "run", "worker": "w", "ttl": "NaN"}, 400, "ttl"),
        ("POST", "/leases", {"run": "run", "worker": ""}, 400, "cannot name a worker"),
        ("POST", "/runs", {"id": "r", "name": "n" * 200_000}, 413, "the limit is 100000"),
        ("POST", "/tokens", {"id": "t", "scope": "runner", "digest": "hunter2"}, 400, "SHA-256"),
        ("POST", "/tokens", {"id": "t", "scope": "runner", "digest": "a" * 64, "project": "*"}, 400, "one project"),
        ("POST", "/tokens", {"id": "t", "scope": "runner", "digest": "a" * 64, "revoked_at": 1}, 400, "revoked"),
        ("POST", "/tokens", {"id": "\x1b[31mx", "scope": "runner", "digest": "a" * 64}, 400, "the id of a token"),
        ("POST", "/tokens", {"id": "t", "scope": "runner", "digest": "a" * 64, "name": "\x1b[2J"}, 400, "printable"),
        ("POST", "/tokens", {"id": "t", "scope": "runner", "digest": "a" * 64, "expires_at": 1e18}, 400, "is no time"),
        ("POST", "/tokens", {"id": "t", "scope": "runner", "digest": "a" * 64, "expires_at": "NaN"}, 400, "expires_at"),
        ("PUT", "/resources/w/aliases/production", {"version": 3}, 422, "no version 3"),
        ("POST", "/rollouts/run%2F0/attempts/7/complete", {"outcome": {"reward": 1}}, 409, "has not begun"),
        ("POST", "/rollouts/run%2F0/attempts/1/complete", {"outcome": {}}, 400, "a reward or a fault"),
    ],
)
async def test_a_refusal_names_culprit_and_cure(
    world: World, method: str, target: str, body: object, status: int, words: str
) -> None:
    answer = await world.ask(method, target, body)
    assert (answer.status, words in answer.json["error"]["message"]) == (status, True), answer.body
    if status == 405:
        assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize("payload", [b"[" * 50_000, b'{"run":"' + b"\\ud800" * 3 + b'","worker":"w"}', b"\x00", b"NaN"])
async def test_no_body_is_a_fault_of_the_server(world: World, payload: bytes) -> None:
    answer = await world.ask("POST", "/leases", payload=payload)
    assert answer.status in (200, 400)


@pytest.mark.parametrize(
    ("encoding", "payload", "status", "words"),
    [
        ("gzip", gzip.compress(b'{"run": "run", "worker": "w", "limit": 1, "ttl": 60}'), 200, ""),
        ("zstd", zstandard.compress(b" " * 200_000), 413, "the limit is 100000"),
        ("br", b"x", 415, "is 'br'"),
    ],
    ids=["gzip", "bomb", "br"],
)
async def test_a_packed_body_is_read(world: World, encoding: str, payload: bytes, status: int, words: str) -> None:
    headers = ((b"content-encoding", encoding.encode()),)
    entrance = Entrance(Guard(world.api, PortLimits()), PortLimits(), loopback=True)
    asked = replace(world, api=entrance).ask("POST", "/leases", payload=payload, headers=headers, token="runner")
    answer = await asked
    assert (answer.status, words in answer.body.decode()) == (status, True), answer.body


async def test_two_tokens_are_none(world: World) -> None:
    answer = await world.ask("GET", "/runs", headers=world.authorization("viewer"))
    assert (answer.status, answer.error) == (401, "missing_token")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (StoreError("refused"), 422, "refused"),
        (UnavailableError("gone"), 503, "unavailable"),
        (ValueError("a bug with hush in it"), 500, "server_fault"),
    ],
)
async def test_faults_behind_the_api(
    world: World, error: Exception, status: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def finish(store: object, rollout: str, attempt: int, outcome: Outcome) -> Any:
        raise error

    world.api = Api(world.store, Authenticator(world.store), finish=finish)
    answer = await world.ask("POST", "/rollouts/run%2F0/attempts/1/complete", {"outcome": {"reward": 1}})
    assert (answer.status, answer.error) == (status, kind)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert b"hush" not in answer.body
    assert bool(caplog.records) == (status == 500)
    assert world.tokens["admin"] not in caplog.text


async def test_a_lease_without_a_gateway_says_so() -> None:
    world = await make_world(llm_for=None)
    held = (await world.ask("POST", "/leases", {"run": "run", "worker": "w"})).json["leases"]
    assert [one["llm"] for one in held] == [None]
    await world.store.close()


async def test_what_was_leased_is_given_again_while_no_policy_server_answers() -> None:
    """The answer was lost, and so was the policy server before the request came again; new work waits for it."""
    up = True

    async def served(run: str) -> bool:
        return up

    world = await make_world(served=served)
    await world.store.create_rollouts([Rollout("run/1", "run", Task("q"), "g")])
    body = {"run": "run", "worker": "w", "limit": 1, "ttl": 60}

    async def lease(*key: tuple[bytes, bytes]) -> Any:
        return (await world.ask("POST", "/leases", body, headers=key)).json["leases"]

    first = await lease((b"idempotency-key", b"1"))
    assert [held["lease"]["rollout"]["id"] for held in first] == ["run/0"]
    up = False
    (again,) = await lease((b"idempotency-key", b"1"))
    assert (again["llm"], again["lease"]["rollout"]) == (first[0]["llm"], first[0]["lease"]["rollout"])
    assert await lease((b"idempotency-key", b"2")) == await lease() == []
    up = True
    (new,) = await lease((b"idempotency-key", b"2"))
    assert new["lease"]["rollout"]["id"] == "run/1"
    await world.store.close()


async def test_what_has_no_model_for_its_agent_is_given_back_and_comes_to_an_end() -> None:
    async def llm_for(lease: object, store: object) -> LLM:
        raise StoreError("its prompts are gone")

    world = await make_world(llm_for=llm_for)
    for _ in range(EXCUSED + 2):
        found = await world.store.get_rollout("run/0")
        assert found is not None
        assert found.status is Status.PENDING
        answer = await world.ask("POST", "/leases", {"run": "run", "worker": "w"})
        assert (answer.status, answer.json["leases"]) == (200, [])
    found = await world.store.get_rollout("run/0")
    assert found is not None
    assert (found.status, found.fault) == (Status.FAILED, Fault.INFRASTRUCTURE)
    assert "its prompts are gone" in found.error
    await world.store.close()


PARTS = st.sampled_from(
    [
        "runs",
        "run",
        "rollouts",
        "run%2F0",
        "attempts",
        "1",
        "leases",
        "state",
        "resources",
        "watch",
        "..",
        "%00",
        "%ff",
        "",
    ]
)
TARGETS = st.lists(PARTS | st.text("abc/%?&=.\0é\\", max_size=5), max_size=6).map(lambda parts: "/" + "/".join(parts))
QUERIES = st.text("abclimtcursoe=&%0123-\xff+", max_size=20)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[asyncio.Runner, World]]:
    """A world that outlives the examples of a property."""
    with asyncio.Runner() as runner:
        world = runner.run(make_world())
        yield runner, world
        runner.run(world.api.close())
        runner.run(world.store.close())


@settings(max_examples=80)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"]),
    target=st.sampled_from([route.path for route in routes()]) | TARGETS,
    query=QUERIES,
    payload=st.binary(max_size=40) | st.sampled_from([b"{}", b'{"run":"run","worker":"w"}', b'{"rollouts":[{}]}']),
    headers=st.lists(
        st.tuples(st.sampled_from([b"accept", b"content-length", b"x"]), st.sampled_from([b"1", b"text/html"])),
        max_size=2,
    ),
)
def test_whatever_is_sent_is_answered(
    running: tuple[asyncio.Runner, World],
    method: str,
    target: str,
    query: str,
    payload: bytes,
    headers: list[tuple[bytes, bytes]],
) -> None:
    runner, world = running
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = connection(method, "/", (*world.authorization("admin"), *headers))
    scope["raw_path"] = f"/api/v1{target}".encode("latin-1", "replace")
    scope["query_string"] = query.encode("latin-1")
    runner.run(asyncio.wait_for(world.api(scope, receiver(payload), send), 5))
    assert sent[0]["status"] in (200, 400, 404, 405, 409, 413, 422)
