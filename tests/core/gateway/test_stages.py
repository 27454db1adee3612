"""Plugins in the line of a call: what a stage may do at each point, the order of stages, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import DataError, GatewayError, StoreError
from lightning.gateway.call import Answer, Call, Request
from lightning.gateway.dialects import Chat
from lightning.gateway.identity import Claims
from lightning.gateway.stages import API, CONTRACT, POINTS, CallStage, Line, NamedStage
from lightning.plugins import Plugins
from lightning.plugins import stages as named
from lightning.plugins.stages import StageError
from lightning.testing import Reply
from lightning.types import UNNAMED, UNSERVED, CallStatus, Fault, Outcome, Rollout, Task

ANSWERS = """
import lightning
from lightning.gateway.http import RefusalError
from lightning.gateway.stages import CallStage
from starlette.responses import JSONResponse


class Stage(CallStage):
    api, after = 1, ("texts",)
    seen = []

    def __init__(self, parts):
        self.store = parts.store
        parts.closing.callback(self.seen.append, ("close",))

    async def admitted(self, call, request):
        self.seen.append(("admitted", call.caller.name, request.model))
        if request.body.get("user") == "answered":
            return JSONResponse({"said": "by the plugin"})
        if request.body.get("user") == "refused":
            raise RefusalError(422, "not_today", "Ask tomorrow.")

    async def sending(self, call, body):
        self.seen.append(("sending", body["messages"][-1]["content"]))
        body["max_tokens"] = 3

    async def settled(self, call, answer):
        self.seen.append(("settled", answer.status, answer.outcome.value))
        if call.sent.plan.requested_model == "void":
            raise RefusalError(409, "void", "Not this one.")

    async def kept(self, call, transitions):
        assert [each.id for each in await self.store.transitions(call.claims.rollout)] == [call.capture.id]
        self.seen.append(("kept", [each.seq for each in transitions]))


@lightning.hookimpl
def register_call_stages(register):
    register("stranger", Stage)
"""
FAILS = """
import lightning
from lightning.gateway.stages import CallStage


class Stage(CallStage):
    api, after = 1, ("texts",)

    async def POINT(self, *given):
        raise KeyError("what it needs")


@lightning.hookimpl
def register_call_stages(register):
    register("stranger", lambda parts: Stage())
"""
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def stranger(install, monkeypatch: pytest.MonkeyPatch):
    """A plugin with a stage, found as an installed one is."""

    def make(source: str = ANSWERS, name: str = "stranger") -> None:
        install(f"{name}-stage", {name: f"{name}_stage"}, {f"{name}_stage": source})
        found = Plugins()
        monkeypatch.setattr(named, "plugins", lambda: found)

    return make


def seen(house) -> list[tuple[object, ...]]:
    stage = house.gateway.parts.line.named("stranger")
    assert stage is not None
    return stage.seen


async def test_a_stage_sees_a_call_at_each_point_and_changes_what_is_sent(stranger, build) -> None:
    stranger()
    house = await build()
    answer = await (await house.http()).post("/chat/completions", json={**ASKED, "max_tokens": 50})
    assert answer.status_code == 200
    assert seen(house) == [("admitted", "agent", "policy"), ("sending", "hello"), ("settled", 200, "ok"), ("kept", [0])]
    (sent,) = [asked for asked in house.fake.requests if "completions" in asked.path]
    assert sent.body["max_tokens"] == 3
    await house.gateway.close()
    assert seen(house)[-1] == ("close",)


async def test_a_stage_answers_a_call_which_is_then_no_call(stranger, build) -> None:
    stranger()
    house = await build()
    answer = await (await house.http()).post("/chat/completions", json={**ASKED, "user": "answered"})
    assert answer.json() == {"said": "by the plugin"}
    assert await house.transitions() == []
    assert [asked for asked in house.fake.requests if "completions" in asked.path] == []


@pytest.mark.parametrize("kinds", [(), ("branch",), ("session",), ("session", "branch")])
async def test_a_stage_stands_in_the_calls_of_the_keys_that_it_is_only_for(kinds: tuple[str, ...]) -> None:
    seen: list[str] = []

    class Answers(CallStage):
        api, answers = 1, ("branch", "session")

    class Keyed(CallStage):
        api, only_for = 1, kinds

        async def admitted(self, call, request):
            seen.append("admitted")

        async def sending(self, call, body):
            seen.append("sending")

        async def settled(self, call, answer):
            seen.append("settled")

        async def kept(self, call, transitions):
            seen.append("kept")

    line = Line([NamedStage("answers", Answers()), NamedStage("keyed", Keyed())])
    for claims in (Claims("r", 1, 0.0), Claims("r", 1, 0.0, branch=True), Claims("r", 1, 0.0, session="run")):
        call = Call(Chat(), UNNAMED, claims, lambda: pytest.fail("no policy is asked for"), [])
        await line.admitted(call, Request({}, b"", {}, None))
        await line.sending(call, {})
        await line.settled(call, Answer(200))
        await line.kept(call, [])
        await line.broken_off(call, Answer(0))
        stands = not kinds or (claims.branch and "branch" in kinds) or (claims.session and "session" in kinds)
        assert seen == (["admitted", "sending", "settled", "kept", "settled"] if stands else [])
        seen.clear()


def test_a_stage_that_is_kept_out_of_the_calls_that_it_answers_is_refused() -> None:
    kept_out = type("KeptOut", (CallStage,), {"api": API, "answers": ("branch",), "only_for": ("session",)})()
    with pytest.raises(
        GatewayError, match="answers the keys of branch, and its `only_for` keeps it out of their calls"
    ):
        Line([NamedStage("kept_out", kept_out)])


@pytest.mark.parametrize("said", [{"user": "refused"}, {"model": "void"}, {"model": "void", "stream": True}])
async def test_what_a_stage_refuses_is_refused_and_recorded(stranger, build, said) -> None:
    stranger()
    house = await build()
    answer = await (await house.http()).post("/chat/completions", json={**ASKED, **said})
    code, message = ("not_today", "Ask tomorrow.") if "user" in said else ("void", "Not this one.")
    assert code in answer.text
    assert message in answer.text
    (call,) = await house.recorded()
    assert (call.status, call.finish_reason, call.error) == (CallStatus.REFUSED, code, message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", POINTS)
async def test_a_stage_that_fails_fails_the_call_by_its_name(stranger, build, warnings_of, point, stream) -> None:
    stranger(FAILS.replace("POINT", point))
    house = await build()
    answer = await (await house.http()).post("/chat/completions", json={**ASKED, "stream": stream})
    assert "stage_failed" in answer.text
    assert f"The stage 'stranger' of the plugin 'stranger' failed on this call ({point}: KeyError)" in answer.text
    assert "[DONE]" not in answer.text
    assert f"the stage 'stranger' of the plugin 'stranger' failed on a call of rollout-0 ({point})" in warnings_of()
    *before, told = await house.recorded(2 if point == "kept" else 1)
    assert (told.status, told.finish_reason) == (CallStatus.ERROR, UNSERVED)
    assert "The stage 'stranger' of the plugin 'stranger' failed" in told.error
    assert [call.status for call in before] == ([CallStatus.ABORTED] if point == "kept" else [])


READS = """
import lightning
from lightning.gateway.http import RefusalError
from lightning.gateway.stages import CallStage


class Stage(CallStage):
    api, after = 1, ("texts",)
    seen = []

    def __init__(self, parts): ...

    def reading(self, call, request):
        self.seen.append((call.is_planned, {**request.body}))
        raise RAISED


@lightning.hookimpl
def register_call_stages(register):
    register("stranger", Stage)
"""


@pytest.mark.parametrize("large", [False, True])
async def test_a_stage_reads_what_the_agent_sent_and_may_refuse_it(stranger, build, large) -> None:
    """It is read before the gateway makes the policy server's request of it, of a large one in the same thread."""
    asked = {**ASKED, **({"extra_list": [0] * 30_000} if large else {})}
    stranger(READS.replace("RAISED", 'RefusalError(422, "not_today", "Ask tomorrow.")'))
    house = await build()
    answer = await (await house.http()).post("/chat/completions", json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "not_today")
    assert seen(house) == [(False, asked)]
    (call,) = await house.recorded()
    assert (call.status, call.finish_reason, call.error) == (CallStatus.REFUSED, "not_today", "Ask tomorrow.")


@pytest.mark.parametrize("large", [False, True])
async def test_a_stage_that_cannot_read_a_request_fails_the_call_by_its_name(
    stranger, build, warnings_of, large
) -> None:
    stranger(READS.replace("RAISED", "KeyError"))
    house = await build()
    asked = {**ASKED, **({"extra_list": [0] * 30_000} if large else {})}
    answer = await (await house.http()).post("/chat/completions", json=asked)
    assert "The stage 'stranger' of the plugin 'stranger' failed on this call (reading: KeyError)" in answer.text
    assert "the stage 'stranger' of the plugin 'stranger' failed on a call of rollout-0 (reading)" in warnings_of()
    (told,) = await house.recorded()
    assert (told.status, told.finish_reason) == (CallStatus.ERROR, UNSERVED)


async def test_a_store_that_fails_a_stage_is_no_fault_of_the_plugin(stranger, build) -> None:
    source = FAILS.replace("POINT", "admitted").replace("raise KeyError", "raise lightning.errors.StoreError")
    stranger(source.replace("import lightning\n", "import lightning\nimport lightning.errors\n", 1))
    house = await build()
    answer = await (await house.http()).post("/chat/completions", json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_failed")


async def test_a_stage_for_another_api_is_refused_with_the_cure(stranger, build) -> None:
    stranger(FAILS.replace("api, after = 1,", "api, after = 7,").replace("POINT", "kept"))
    with pytest.raises(GatewayError, match=r"plugin 'stranger' was written for API 7; this gateway has API 1.*DISABLE"):
        await build()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("async def setteld(self, call, answer): ...", "has 'setteld', which is never asked: did you mean 'settled'"),
        ("def settled(self, call, answer): ...", "'settled' of the stage .* is awaited: begin it with `async def`"),
        ('after = ("texts")', "`after` of the stage .* is a text: make it a tuple"),
        ('answers = ("branch")', "`answers` of the stage .* is a text: make it a tuple"),
        ('only_for = ("branch")', "`only_for` of the stage .* is a text: make it a tuple"),
        (
            'only_for = ("twig",)',
            "`only_for` of the stage .* names keys that there are none of: twig. There are branch, session",
        ),
    ],
)
async def test_what_is_written_wrongly_is_refused_at_the_start(stranger, build, written: str, said: str) -> None:
    source = doing("kept", "pass").replace("    async def kept(self, call, given):\n        pass", f"    {written}")
    stranger(source)
    with pytest.raises(GatewayError, match=said):
        await build()


async def test_two_stages_whose_order_is_not_said_are_refused_until_the_settings_say_it(stranger, build) -> None:
    stranger(FAILS.replace("POINT", "kept"))
    stranger(FAILS.replace("POINT", "kept").replace('"stranger"', '"other"'), "other")
    with pytest.raises(GatewayError, match=r"both stand at 'kept'.*gateway.stage_order = \["):
        await build()
    house = await build(stage_order=["other", "stranger"])
    assert [name for name in house.gateway.stages if name in ("other", "stranger")] == ["other", "stranger"]
    assert house.gateway.stages["stranger"] == "1.0"


async def test_a_call_that_a_stage_stops_keeps_its_texts(stranger, build) -> None:
    stranger(FAILS.replace("POINT", "sending"))
    house = await build()
    assert (await (await house.http()).post("/chat/completions", json=ASKED)).status_code == 500
    (call,) = await house.recorded()
    assert {**call.extras}.keys() == {"texts"}


async def test_a_call_that_broke_off_is_stored_whatever_a_stage_says(stranger, build, warnings_of) -> None:
    stranger(FAILS.replace("POINT", "settled"))
    house = await build()
    house.fake.queue(Reply("hello", die_after=1))
    answer = await (await house.http()).post("/chat/completions", json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")
    (call,) = await house.recorded()
    assert (call.status, {**call.extras}.keys()) == (CallStatus.ERROR, {"texts"})
    assert f"call {call.id} broke off and is stored without the stage 'stranger'" in " ".join(warnings_of())


BODY = """
import lightning
from lightning.errors import StoreError
from lightning.gateway.http import RefusalError
from lightning.gateway.stages import CallStage


class Stage(CallStage):
    api, after = 1, ("texts",)

    async def POINT(self, call, given):
        CODE


@lightning.hookimpl
def register_call_stages(register):
    register("stranger", lambda parts: Stage())
"""


ELSEWHERE = """

class Elsewhere(Stage):
    def elsewhere(self, route, model):
        CODE


@lightning.hookimpl
def register_call_stages(register):
    register("stranger", lambda parts: Elsewhere())
"""


def doing(point: str, code: str) -> str:
    return BODY.replace("POINT", point).replace("CODE", code)


async def test_what_a_stage_changes_of_the_sampling_is_what_is_recorded(stranger, build) -> None:
    stranger(doing("sending", 'given |= {"temperature": 0.5, "response_format": {"type": "json_object"}}'))
    house = await build()
    assert (await (await house.http()).post("/chat/completions", json=ASKED)).status_code == 200
    (call,) = await house.recorded()
    assert (call.temperature, call.constrained) == (0.5, True)


async def test_a_stage_may_not_change_what_the_answer_is_read_by(stranger, build) -> None:
    stranger(doing("sending", 'given["n"] = 2'))
    house = await build()
    answer = await (await house.http()).post("/chat/completions", json=ASKED)
    assert answer.json()["error"]["code"] == "stage_failed"
    assert "it changed n, by which the answer is read" in answer.text
    (call,) = await house.recorded()
    assert (call.status, call.finish_reason) == (CallStatus.ERROR, UNSERVED)


@pytest.mark.parametrize("raised", ['StoreError("gone")', 'RefusalError(503, "later", "Ask again.")'])
async def test_a_call_that_was_sampled_is_recorded_whatever_a_stage_raises(stranger, build, raised: str) -> None:
    stranger(doing("settled", f"raise {raised}"))
    house = await build()
    assert (await (await house.http()).post("/chat/completions", json=ASKED)).status_code == 503
    (call,) = await house.recorded()
    assert (call.status, call.finish_reason, len(call.response_ids) > 0) == (CallStatus.ERROR, UNSERVED, True)


async def test_what_a_stage_adds_too_late_is_not_in_the_record(stranger, build) -> None:
    stranger(doing("kept", 'call.extras["late"] = b"1"; raise KeyError("late")'))
    house = await build()
    assert (await (await house.http()).post("/chat/completions", json=ASKED)).status_code == 500
    taken_back, told = await house.recorded(2)
    assert (taken_back.status, {**taken_back.extras}.keys()) == (CallStatus.ABORTED, {"texts"})
    assert told.finish_reason == UNSERVED


@pytest.mark.parametrize("begun", [False, True])
async def test_a_stages_own_answer_that_fails_is_the_stages_failure(stranger, build, begun: bool) -> None:
    start = 'await send({"type": "http.response.start", "status": 200, "headers": []}); ' if begun else ""
    body = f"async def app(scope, receive, send):\n            {start}raise KeyError('x')\n        return app"
    stranger(doing("admitted", body))
    house = await build()
    http = await house.http()
    if begun:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post("/chat/completions", json=ASKED)
    else:
        answer = await http.post("/chat/completions", json=ASKED)
        assert "The stage 'stranger' of the plugin 'stranger' failed on this call (admitted: KeyError)" in answer.text
    (told,) = await house.recorded()
    assert (told.finish_reason, "'stranger'" in told.error) == (UNSERVED, True)


HANGS = """async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await receive()
            log.append("gone")
            raise RAISED
        return app"""


@pytest.mark.parametrize("raised", ["ClientGoneError", "ClientDisconnect"])
@pytest.mark.parametrize("point", ["admitted", "elsewhere"])
async def test_an_agent_that_hangs_up_during_a_stages_own_answer_is_no_failure(
    stranger, build, warnings_of, point: str, raised: str
) -> None:
    imports = "from lightning.gateway.http import ClientGoneError\nfrom starlette.requests import ClientDisconnect\nlog = []\n"
    own = HANGS.replace("RAISED", raised)
    if point == "elsewhere":
        source = doing("kept", "pass") + ELSEWHERE.replace("CODE", own.replace("(scope", "(payload, scope"))
    else:
        source = doing("admitted", own)
    stranger(imports + source)
    house = await build()
    path = "/chat/completions" if point == "admitted" else "/embeddings"
    with pytest.raises(httpx.TimeoutException):
        await (await house.http()).post(path, json=ASKED, timeout=0.3)
    await house.until(lambda: sys.modules["stranger_stage"].log)
    await asyncio.sleep(0.1)
    assert await house.transitions() == []
    assert not [said for said in warnings_of() if "stranger" in said]


async def test_a_stages_failure_to_answer_another_route_is_the_stages(stranger, build, warnings_of) -> None:
    for_all = 'raise KeyError("what it needs")'
    stranger(doing("kept", "pass") + ELSEWHERE.replace("CODE", for_all))
    house = await build()
    answer = await (await house.http()).post("/embeddings", json={"model": "policy"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "stage_failed")
    assert "The stage 'stranger' of the plugin 'stranger' failed on this call (elsewhere: KeyError)" in answer.text
    assert "the stage 'stranger' of the plugin 'stranger' failed on a call of rollout-0 (elsewhere)" in warnings_of()
    (told,) = await house.recorded()
    assert (told.status, told.finish_reason, "'stranger'" in told.error) == (CallStatus.ERROR, UNSERVED, True)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_stages_answer_to_another_route_that_fails_is_the_stages_failure(
    stranger, build, warnings_of, begun: bool
) -> None:
    start = 'await send({"type": "http.response.start", "status": 200, "headers": []}); ' if begun else ""
    own = f"async def app(payload, scope, receive, send):\n            {start}raise KeyError('x')\n        return app"
    stranger(doing("kept", "pass") + ELSEWHERE.replace("CODE", own))
    house = await build()
    http = await house.http()
    if begun:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post("/embeddings", json={})
    else:
        assert "(elsewhere: KeyError)" in (await http.post("/embeddings", json={})).text
    assert "the stage 'stranger' of the plugin 'stranger' failed on a call of rollout-0 (elsewhere)" in warnings_of()
    (told,) = await house.recorded()
    assert told.finish_reason == UNSERVED


async def test_a_reader_of_a_stream_that_fails_is_its_stages_failure(stranger, build, warnings_of) -> None:
    stranger(doing("sending", "call.readers.append(lambda chunk: chunk['not there'])"))
    house = await build()
    answer = await (await house.http()).post("/chat/completions", json={**ASKED, "stream": True})
    assert "The stage 'stranger' of the plugin 'stranger' failed on this call (a reader: KeyError)" in answer.text
    assert "[DONE]" not in answer.text
    assert "the stage 'stranger' of the plugin 'stranger' failed on a call of rollout-0 (a reader)" in warnings_of()
    (told,) = await house.recorded()
    assert (told.status, told.finish_reason) == (CallStatus.ERROR, UNSERVED)
    assert "The stage 'stranger'" in told.error


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_refused_when_it_was_sampled_is_one_row_with_what_was_sampled(
    stranger, build, stream: bool
) -> None:
    stranger(doing("settled", 'if given.status: raise RefusalError(409, "void", "Not this one.")'))
    house = await build()
    answer = await (await house.http()).post("/chat/completions", json={**ASKED, "stream": stream})
    assert "Not this one." in answer.text
    (call,) = await house.recorded()
    assert (call.status, call.finish_reason, call.error) == (CallStatus.REFUSED, "void", "Not this one.")
    assert (call.seq, len(call.response_ids) > 0, {**call.extras}.keys()) == (0, True, {"texts"})
    assert (await (await house.http()).post("/chat/completions", json=ASKED)).status_code == 409


async def test_a_call_that_is_refused_before_it_is_sent_is_one_row_with_its_texts(stranger, build) -> None:
    stranger(doing("sending", 'raise RefusalError(422, "not_today", "Ask tomorrow.")'))
    house = await build()
    assert (await (await house.http()).post("/chat/completions", json=ASKED)).status_code == 422
    (call,) = await house.recorded()
    assert (call.status, call.finish_reason, call.seq) == (CallStatus.REFUSED, "not_today", 0)
    assert {**call.extras}.keys() == {"texts"}


@pytest.mark.parametrize("raised", ['RefusalError(503, "later", "Ask again.")', 'StoreError("gone")'])
async def test_a_call_that_a_stage_cannot_admit_is_recorded_as_unserved(stranger, build, raised: str) -> None:
    stranger(doing("admitted", f"raise {raised}"))
    house = await build()
    assert (await (await house.http()).post("/chat/completions", json=ASKED)).status_code == 503
    (call,) = await house.recorded()
    assert (call.status, call.finish_reason) == (CallStatus.ERROR, UNSERVED)
    assert call.error


@pytest.mark.parametrize("point", ["sending", "settled", "kept"])
async def test_only_a_stage_that_admits_ends_the_line_by_what_it_returns(stranger, build, point: str) -> None:
    stranger(doing(point, "return given"))
    stranger(
        doing(point, "log.append(given)")
        .replace('"texts",', '"stranger",')
        .replace('("stranger", lambda', '("other", lambda')
        + "\nlog = []\n",
        "other",
    )
    house = await build()
    assert (await (await house.http()).post("/chat/completions", json=ASKED)).status_code == 200
    assert len(sys.modules["other_stage"].log) == 1


async def test_a_name_in_the_order_that_is_nearly_a_stages_is_said(stranger, build, warnings_of) -> None:
    source = doing("kept", "pass")
    stranger(source.replace('after = 1, ("texts",)', 'after = 1, ("texts", "convrsations", "masks", "strangers")'))
    await build()
    (said,) = [said for said in warnings_of() if "names" in said]
    assert said.startswith(
        "`after` of the stage 'stranger' of the plugin 'stranger' names 'convrsations', and no plugin has"
    )
    assert said.endswith("did you mean 'conversations'?")


EXTRAS = """
import lightning
from lightning.gateway.stages import CallStage


class Stage(CallStage):
    api, after = 1, ("texts",)

    async def settled(self, call, answer):
        call.extras["stranger"] = bytes(SIZE)


@lightning.hookimpl
def register_call_stages(register):
    register("stranger", lambda parts: Stage())
"""


async def test_extras_are_stored_with_the_call(stranger, build) -> None:
    stranger(EXTRAS.replace("SIZE", "3"))
    house = await build()
    assert (await (await house.http()).post("/chat/completions", json=ASKED)).status_code == 200
    (call,) = await house.recorded()
    assert {**call.extras}.keys() == {"texts", "stranger"}
    assert call.extras["stranger"] == bytes(3)


async def test_extras_that_are_too_large_fail_the_call_by_the_plugins_name_and_nothing_else_is_lost(
    stranger, build
) -> None:
    stranger(EXTRAS.replace("SIZE", str(10 << 20)))
    house = await build()
    answer = await (await house.http()).post("/chat/completions", json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "stage_failed")
    (call,) = await house.recorded()
    assert "plugin 'stranger' gives 10485760 bytes, and a plugin may keep 8912896" in call.error
    assert (call.status, call.finish_reason, {**call.extras}.keys()) == (CallStatus.ERROR, UNSERVED, {"texts"})
    assert len(call.response_ids) > 0


async def test_a_stage_refuses_what_cannot_begin_as_another_rollout_did() -> None:
    def planner(raised: Exception) -> Line:
        async def planned(self: object, rollout: Rollout) -> None:
            raise raised

        return Line(
            [
                NamedStage(
                    "planner",
                    type("Planner", (CallStage,), {"api": API, "answers": ("branch",), "planned": planned})(),
                    "1",
                    "p",
                )
            ]
        )

    one = Rollout("r", "run", Task("q"), "g", parent=("t", 1, 0))
    with pytest.raises(DataError, match="the rollout t cannot be branched: no stage of this gateway answers"):
        await Line(()).planned(one)
    with pytest.raises(DataError, match="no such call"):
        await planner(DataError("no such call")).planned(one)
    with pytest.raises(
        StageError, match=r"the stage 'planner' of the plugin 'p' failed on the rollout r \(planned: Key"
    ):
        await planner(KeyError("t")).planned(one)


def teller(told: Callable[..., object]) -> NamedStage:
    return NamedStage("teller", type("Teller", (CallStage,), {"api": API, "told": told})(), "1", "p")


@pytest.mark.parametrize("word", [object(), float("nan"), {1, 2}])
def test_what_a_stage_tells_is_json_or_its_failure(word: object) -> None:
    rollout = Rollout("r", "run", Task(0), "g")
    assert Line([teller(lambda self, rollout: {"branch": True})]).told(rollout) == {"teller": {"branch": True}}
    with pytest.raises(StageError, match=r"the stage 'teller' of the plugin 'p' failed on the rollout r \(told"):
        Line([teller(lambda self, rollout: word)]).told(rollout)


def test_what_is_not_awaited_is_no_coroutine() -> None:
    async def told(self: object, rollout: Rollout) -> None:
        return None

    with pytest.raises(GatewayError, match=r"'told' of the stage 'teller' of the plugin 'p' is not awaited"):
        Line([teller(told)])


# the end of an attempt ------------------------------------------------------------------------------------------------
def ending(name: str, ended: Callable[..., object], *, after: Sequence[str] = ()) -> NamedStage:
    async def method(self: object, *given: object) -> object:
        return ended(*given)

    fields = {"api": API, "after": tuple(after), "ended": method}
    return NamedStage(name, type(name, (CallStage,), fields)(), plugin="p")


ENDED = Rollout("r", "run", Task("x"), group="g", attempt=2)
TAUGHT = Outcome(reward=1.0, rewards={"reward": 1.0}, seconds=3.0)


async def test_stages_change_and_void_an_outcome_in_their_order() -> None:
    def halve(rollout: Rollout, outcome: Outcome, calls: Sequence[object]) -> Outcome:
        assert (rollout, calls) == (ENDED, ["a call"])
        return replace(outcome, reward=(outcome.reward or 0) / 2)

    def void(rollout: Rollout, outcome: Outcome, calls: Sequence[object]) -> Outcome:
        return replace(outcome, reward=None, fault=Fault.AGENT, error=f"it was {outcome.reward}")

    line = Line([ending("void", void, after=["halve"]), ending("halve", halve)])
    said = await line.ended(ENDED, TAUGHT, ["a call"])  # type: ignore[list-item]
    assert (said.reward, said.fault, said.error, said.seconds) == (None, Fault.AGENT, "it was 0.5", 3.0)
    with pytest.raises(
        GatewayError, match=r"'void' and 'halve' both stand at 'ended', and neither says which comes first"
    ):
        Line([ending("void", void), ending("halve", halve)])


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (lambda *given: given[1].reward / 0, "ZeroDivisionError: float division by zero"),
        (lambda *given: None, "TypeError: it returned None, which is no Outcome"),
        (
            lambda *given: replace(given[1], reward=math.nan),
            "DataError: the reward of rollout 'r' is nan: it must be a finite number",
        ),
        (
            lambda *given: replace(given[1], reward=None),
            "DataError: the outcome of rollout 'r' must have a reward or a fault, not both and not neither",
        ),
    ],
)
async def test_an_outcome_on_which_a_stage_fails_is_the_infrastructures_fault(ended, why: str) -> None:
    said = await Line([ending("judge", ended)]).ended(ENDED, TAUGHT, [])
    assert (said.reward, said.rewards, said.fault, said.seconds) == (None, {}, Fault.INFRASTRUCTURE, 3.0)
    assert said.error == (
        f"the stage 'judge' of the plugin 'p' failed on this outcome (ended: {why}). Mend the plugin, or start without it: "
        "LIGHTNING_DISABLE_PLUGINS=p"
    )


async def test_a_store_that_fails_a_stage_at_the_end_fails_nothing_but_the_report() -> None:
    def away(*given: object) -> Outcome:
        raise StoreError("the store is away")

    with pytest.raises(StoreError, match="the store is away"):
        await Line([ending("judge", away)]).ended(ENDED, TAUGHT, [])


# the order ------------------------------------------------------------------------------------------------------------
def made(name: str, points: Sequence[str], before: Sequence[str] = (), after: Sequence[str] = ()) -> NamedStage:
    async def stand(self: object, *given: object) -> None:
        return None

    fields = {"api": API, "before": tuple(before), "after": tuple(after), **dict.fromkeys(points, stand)}
    return NamedStage(name, type(name, (CallStage,), fields)())


def test_stages_at_different_points_need_no_order() -> None:
    assert len(CONTRACT.in_order([made("a", ["admitted"]), made("b", ["kept"])], ())) == 2


def test_an_order_is_known_by_way_of_a_stage_that_is_not_there() -> None:
    stages = [made("late", ["kept"], after=["texts"]), made("early", ["kept"], before=["texts"])]
    assert [each.name for each in CONTRACT.in_order(stages, ())] == ["early", "late"]


def test_an_order_that_goes_round_is_refused() -> None:
    with pytest.raises(GatewayError, match="goes round: 'a' and 'b' each stand before the other"):
        Line([made("a", ["kept"], before=["b"]), made("b", ["kept"], before=["a"])])


@given(st.permutations(range(5)), st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_an_order_is_the_one_that_was_said_or_none_at_all(arrived, said) -> None:
    """By whichever of the two it is said, and however the plugins were installed."""
    pairs = {(min(pair), max(pair)) for pair in said if pair[0] != pair[1]}
    stages = [
        made(
            str(each),
            ["kept"],
            before=[str(later) for first, later in pairs if first == each and (first + later) % 2],
            after=[str(first) for first, later in pairs if later == each and not (first + later) % 2],
        )
        for each in arrived
    ]
    neighbours = all((one, one + 1) in pairs for one in range(4))
    if neighbours:
        assert [each.name for each in CONTRACT.in_order(stages, ())] == ["0", "1", "2", "3", "4"]
    else:
        with pytest.raises(GatewayError, match="neither says which comes first"):
            CONTRACT.in_order(stages, ())
        assert [each.name for each in CONTRACT.in_order(stages, "01234")] == ["0", "1", "2", "3", "4"]
    assert all(each.stands_at("kept") for each in itertools.chain(stages))
