"""Who may call, who is calling, and what a wrong request is told."""

from __future__ import annotations

import contextlib
import json
import time

import httpx
import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import ConfigError, UnavailableError
from lightning.gateway.dialects import is_constrained
from lightning.gateway.http import RefusalError, read_body, read_object, write_object
from lightning.gateway.identity import TokenSigner, is_canonical, parse_caller
from lightning.types import EXPIRED, Caller, CallStatus, Outcome

from tests.core.gateway.conftest import SECRET

HI = [{"role": "user", "content": "hi there"}]
OK = {"messages": HI}


async def post(house, path: str = "/v1/chat/completions", **kwargs: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=house.gateway.url) as http:
        return await http.post(path, **kwargs)


def said(answer: httpx.Response) -> dict[str, str]:
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "code"}
    return error


def forged(rollout: str) -> str:
    claims = {"aud": "lightning-gateway", "sub": rollout, "att": 1, "exp": time.time() + 100}
    return jwt.encode(claims, b"x" * 32, algorithm="HS256")


def unsigned(rollout: str) -> str:
    claims = {"aud": "lightning-gateway", "sub": rollout, "att": 1, "exp": time.time() + 100}
    return jwt.encode(claims, None, algorithm="none")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_no_token_is_a_401_with_the_cure(house, path):
    answer = await post(house, path, json=OK)
    assert answer.status_code == 401
    assert said(answer)["code"] == "missing_token"
    assert "llm.api_key" in said(answer)["message"]


FOREIGN = [lambda _: "sk-ant-of-the-user", forged, lambda _: "a.b.c"]


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize(
    ("right", "wrong"), [("x-api-key", "authorization"), ("authorization", "x-api-key"), ("api-key", "x-api-key")]
)
async def test_of_several_keys_the_one_that_verifies_counts(house, foreign, right, wrong):
    """Clients send what they find in their environment (`ANTHROPIC_AUTH_TOKEN`) beside the key that they were given."""
    llm = await house.llm()
    keys = {right: llm.api_key, wrong: foreign("rollout-0")}
    sent = {name: f"Bearer {key}" if name == "authorization" else key for name, key in keys.items()}
    assert (await post(house, json=OK, headers=sent)).status_code == 200
    (call,) = await house.transitions()
    assert call.status is CallStatus.OK
    assert not set(house.fake.requests[0].headers) & {"authorization", "x-api-key", "api-key"}


async def test_of_several_keys_that_open_nothing_the_one_that_has_expired_is_told_of(house):
    llm = await house.llm()
    old = house.gateway.issue("rollout-0", 1, ttl=-1)
    answer = await post(house, json=OK, headers={"authorization": "Bearer sk-other", "x-api-key": old})
    assert (answer.status_code, said(answer)["code"]) == (401, "expired_token")
    answer = await post(house, json=OK, headers={"authorization": "Bearer sk-1", "x-api-key": "sk-2"})
    assert (answer.status_code, said(answer)["code"]) == (401, "invalid_token")
    named = {"x-lightning-rollout": "sk-1", "authorization": f"Bearer {llm.api_key}"}
    assert (
        await post(house, json=OK, headers=named)
    ).status_code == 401  # the header is more than a key that was found


async def test_a_foreign_key_beside_the_right_one_makes_no_other_client_of_it(build):
    house = await build(limits={"requests_per_second": 0.5})
    llm = await house.llm()
    answers = [
        await post(house, json=OK, headers={"authorization": f"Bearer sk-{number}", "x-api-key": llm.api_key})
        for number in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 429]


@pytest.mark.parametrize("make", [forged, unsigned, lambda _: "sk-123", lambda _: "a.b.c", lambda _: "x" * 10_000])
async def test_foreign_tokens_are_a_401(house, make):
    lease = await house.lease()
    token = make(lease.rollout.id)
    answer = await post(house, json=OK, headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 401
    assert "llm.api_key" in said(answer)["message"]
    assert not house.fake.requests


async def test_an_expired_token_is_a_401(house):
    lease = await house.lease()
    token = house.gateway.issue(lease.rollout.id, lease.attempt, ttl=-1)
    answer = await post(house, json=OK, headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 401
    assert "gateway.token_ttl" in said(answer)["message"]


@pytest.mark.parametrize("before", [True, False], ids=["known here", "issued elsewhere"])
@pytest.mark.parametrize("route", ["chat/completions", "completions", "responses", "messages"])
async def test_that_a_key_has_expired_is_recorded_once_before_it_is_said(house, before, route):
    lease = await house.lease()
    issuer = house.gateway if before else TokenSigner(SECRET)
    token = issuer.issue(lease.rollout.id, lease.attempt, ttl=-1)
    for _ in range(3):
        answer = await post(house, f"/v1/{route}", json=OK, headers={"authorization": f"Bearer {token}"})
        assert answer.status_code == 401
        (call,) = await house.transitions()
        assert (call.status, call.finish_reason, len(call.response_ids)) == (CallStatus.ERROR, EXPIRED, 0)


async def test_an_expired_key_of_an_attempt_that_is_over_records_nothing_and_one_of_nobody_neither(house, caplog):
    lease = await house.lease()
    token = house.gateway.issue(lease.rollout.id, lease.attempt, ttl=-1)
    foreign = TokenSigner(b"another" * 9).issue(lease.rollout.id, lease.attempt, ttl=-1)
    payload = {"aud": "elsewhere", "sub": lease.rollout.id, "att": lease.attempt, "exp": time.time() - 1}
    misused = jwt.encode(payload, TokenSigner(SECRET)._key, algorithm="HS256")
    for other in (foreign, misused):
        answer = await post(house, json=OK, headers={"authorization": f"Bearer {other}"})
        assert (answer.status_code, said(answer)["code"]) == (401, "invalid_token")
    await house.store.complete(lease.rollout.id, lease.attempt, Outcome(reward=1.0))
    answer = await post(house, json=OK, headers={"authorization": f"Bearer {token}"})
    assert (answer.status_code, said(answer)["code"]) == (401, "expired_token")
    assert await house.transitions() == []
    assert not caplog.records


async def test_an_expired_key_is_refused_when_the_store_does_not_take_that(house, caplog, monkeypatch):
    lease = await house.lease()
    headers = {"authorization": f"Bearer {house.gateway.issue(lease.rollout.id, lease.attempt, ttl=-1)}"}

    async def away(*_):
        raise UnavailableError("away")

    with monkeypatch.context() as patched:
        patched.setattr(house.store, "append", away)
        assert (await post(house, json=OK, headers=headers)).status_code == 401
    assert f"could not record the refused call of {lease.rollout.id} (expired_token): away" in caplog.text
    assert (await post(house, json=OK, headers=headers)).status_code == 401
    assert len(await house.transitions()) == 1, "it is tried again with the next call"


async def test_a_token_expires_while_it_is_remembered(monkeypatch):
    signer = TokenSigner(b"s" * 32)
    token = signer.issue("r", 1, ttl=100)
    assert signer.verify(token).rollout == "r"
    later = time.time() + 200
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(Exception, match="expired"):
        signer.verify(token)


def test_tokens_are_url_safe_and_of_one_secret():
    token = TokenSigner(b"s" * 32).issue("rollout/ü 1", 3, ttl=10, sampling={"temperature": 0.5})
    assert token.replace(".", "").replace("-", "").replace("_", "").isalnum()
    claims = TokenSigner(b"s" * 32).verify(token)
    assert (claims.rollout, claims.attempt, claims.sampling) == ("rollout/ü 1", 3, {"temperature": 0.5})
    with pytest.raises(Exception, match="not one of this gateway"):
        TokenSigner(b"t" * 32).verify(token)
    with pytest.raises(ConfigError, match="signing secret"):
        TokenSigner(b"short")


ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
RESPELLINGS = {
    "other last bits": lambda token: token[:-1] + ALPHABET[ALPHABET.index(token[-1]) ^ 1],
    "padding": lambda token: f"{token}=",
    "characters that are none": lambda token: f"{token[:-5]}!!!!{token[-5:]}",
    "base64's own letters": lambda token: token[:-43] + token[-43:].replace("-", "+").replace("_", "/") + "=",
}


@pytest.mark.parametrize("respell", RESPELLINGS.values(), ids=RESPELLINGS)
def test_a_key_has_one_spelling(respell):
    """Each spelling would have a share of requests of its own."""
    signer = TokenSigner(b"a secret of a test, quite long")
    token = signer.issue("rollout", 1, 60)
    with pytest.raises(RefusalError) as caught:
        signer.verify(respell(token))
    assert (caught.value.status, caught.value.code) == (401, "invalid_token")
    assert not is_canonical(respell(token)), "whatever the release of PyJWT reads over"
    assert is_canonical(token)
    assert signer.verify(token).rollout == "rollout"


async def test_header_wins_over_path_wins_over_key(house):
    leases = [await house.lease() for _ in range(3)]
    header, path, key = (house.gateway.issue(lease.rollout.id, lease.attempt) for lease in leases)
    bearer = {"authorization": f"Bearer {key}"}
    both = {**bearer, "x-lightning-rollout": header}
    assert (await post(house, f"/r/{path}/v1/chat/completions", json=OK, headers=both)).status_code == 200
    assert (await post(house, f"/r/{path}/v1/chat/completions", json=OK, headers=bearer)).status_code == 200
    assert (await post(house, json=OK, headers=bearer)).status_code == 200
    assert [len(await house.transitions(number)) for number in range(3)] == [1, 1, 1]


async def test_a_bad_rollout_header_is_refused_even_with_a_good_key(house):
    http = await house.http()
    answer = await http.post("/chat/completions", json=OK, headers={"x-lightning-rollout": "nonsense"})
    assert answer.status_code == 401


async def test_a_token_opens_nothing_else(house):
    http = await house.http()
    for path in ("/embeddings", "/responses/resp_1/cancel", "/rollouts", "/audio/speech"):
        answer = await http.post(path, json={})
        assert answer.status_code == 404
        assert "POST /v1/chat/completions" in said(answer)["message"]
    for path in ("/collective_rpc", "/pause", "/load_lora_adapter", "/"):
        assert (await post(house, path, json={})).status_code == 404
    assert not house.fake.requests


async def test_the_token_is_not_repeated_in_errors(house):
    llm = await house.llm()
    answer = await post(house, f"/r/{llm.api_key}/v1/nothing", json={})
    assert answer.status_code == 404
    assert llm.api_key not in answer.text


async def test_wrong_method(house):
    http = await house.http()
    answer = await http.get("/chat/completions")
    assert answer.status_code == 405
    assert "POST /v1/chat/completions" in said(answer)["message"]


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_too_large_is_a_413(build, declared):
    house = await build(max_body_bytes=2000)
    http = await house.http()
    payload = json.dumps({"messages": [{"role": "user", "content": "x" * 3000}]}).encode()

    async def pieces():
        yield payload

    answer = await http.post("/chat/completions", content=payload if declared else pieces())
    assert answer.status_code == 413
    assert "gateway.max_body_bytes" in said(answer)["message"]
    assert (await http.post("/chat/completions", json=OK)).status_code == 200


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (b"{", "not JSON"),
        (b"[1]", "JSON object"),
        (b"", "not JSON"),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": [{}], "stream": "yes"}', "stream"),
        (b'{"messages": [{}], "n": 0}', "'n'"),
        (b'{"messages": [{}], "n": "3"}', "'n'"),
        (b'{"messages": [{}], "n": 1000000000000000000}', "'n'"),
        (b'{"messages": [{}], "stream": true, "stream_options": 3}', "stream_options"),
        (b'{"messages": [{}], "stream_options": {}}', "stream_options"),
    ],
)
async def test_bad_requests_are_a_422_that_names_the_field(house, payload, named):
    http = await house.http()
    answer = await http.post("/chat/completions", content=payload)
    assert answer.status_code == 422
    assert named in said(answer)["message"]
    assert not house.fake.requests


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"identity, ZSTD"])
async def test_a_packed_body_that_nothing_has_unpacked_is_refused_unread(encoding):
    async def receive():
        raise AssertionError("it is not read")

    name = encoding.decode().lower().removeprefix("identity, ")
    with pytest.raises(RefusalError, match=f"content-encoding is '{name}', and nothing here unpacks it") as caught:
        await read_body({"headers": [(b"content-encoding", encoding)]}, receive, 100)
    assert (caught.value.status, caught.value.headers) == (415, ((b"accept-encoding", b"identity"),))
    assert "send it as it is, or to a port that a plugin guards. The plugin 'server' brings it." in str(caught.value)


@pytest.mark.parametrize(
    ("header", "model", "expected"),
    [
        (None, "policy", Caller("agent")),
        (None, None, Caller("agent")),
        (None, "policy:writer", Caller("writer")),
        (None, "gpt-4o:writer", Caller("agent")),
        (b'{"agent": "a"}', "policy:writer", Caller("a")),
        (
            b'{"agent": "agent", "framework": "adapter-failed:x"}',
            "policy:writer",
            Caller("writer", framework="adapter-failed:x"),
        ),
        (
            b'{"agent":"a","path":["sql","a"],"span_id":"1","parent_id":"2","framework":"raw"}',
            "policy",
            Caller("a", ("sql", "a"), "1", "2", "raw"),
        ),
        (b"nonsense", "policy:writer", Caller("writer")),
        (b'{"agent": 3}', "policy", Caller("agent")),
        (b'{"agent": "a", "path": [1]}', "policy", Caller("agent")),
        (b'{"agent": "' + b"a" * 9000 + b'"}', "policy", Caller("agent")),
    ],
)
async def test_who_is_calling(house, header, model, expected):
    http = await house.http()
    headers = {} if header is None else {"x-lightning-caller": header}
    answer = await http.post("/chat/completions", json={**OK, "model": model}, headers=headers)
    assert answer.status_code == 200
    (step,) = await house.transitions()
    assert step.caller == expected


@given(st.binary(max_size=60))
def test_any_caller_header_is_read_or_refused_in_a_known_way(value):
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        assert parse_caller(value).agent


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_bodies_survive_the_gateway(body):
    assert json.loads(write_object(read_object(json.dumps(body).encode()))) == body


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
@pytest.mark.parametrize("beside", ["1", "12345678901234567890"])
def test_what_json_has_no_number_for_is_refused(word, beside):
    """It could only be passed on as something else."""
    with pytest.raises(RefusalError, match=f"{word} is no number of JSON") as caught:
        read_object(f'{{"a": [{beside}, {word}]}}'.encode())
    assert (caught.value.status, caught.value.code) == (422, "invalid_json")


@pytest.mark.parametrize("number", ["9223372036854775807", "123456789012345678901234567890"])
def test_the_last_of_two_fields_of_one_name_counts(number):
    assert read_object(f'{{"a": {number}, "a": 2}}'.encode()) == {"a": 2}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, False),
        ({"temperature": 0.3, "top_p": 1.0, "top_k": -1, "min_p": 0, "stop": ["x"], "seed": 3, "max_tokens": 4}, False),
        ({"response_format": {"type": "text"}, "tools": [{"function": {"name": "f"}}], "tool_choice": "auto"}, False),
        ({"temperature": 0}, True),
        ({"top_p": 0.9}, True),
        ({"top_k": 20}, True),
        ({"min_p": 0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"min_tokens": 2}, True),
        ({"logit_bias": {"4": 1}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"structured_outputs": {"regex": "a"}}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"tools": [{"function": {"name": "f", "strict": True}}]}, True),
        ({"tools": [{"function": {"name": "f", "strict": True}}], "tool_choice": "none"}, False),
    ],
)
def test_constrained_calls_are_known(body, expected):
    assert is_constrained(body) is expected


async def test_constrained_is_recorded_with_the_overrides_applied(build):
    house = await build(override_sampling={"top_p": 1.0})
    http = await house.http()
    await http.post("/chat/completions", json={**OK, "top_p": 0.5})
    await http.post("/chat/completions", json={**OK, "top_k": 5})
    assert [step.constrained for step in await house.transitions()] == [False, True]


@pytest.mark.parametrize("name", ["stream", "n", "stream_options"])
async def test_a_refusal_does_not_quote_megabytes(house, name):
    http = await house.http()
    messages = [{"role": "user", "content": "hi"}]
    reply = await http.post("/chat/completions", json={"messages": messages, name: ["a text"] * 10_000})
    assert (reply.status_code, reply.json()["error"]["param"]) == (422, name)
    assert len(reply.content) < 50_000
