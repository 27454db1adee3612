"""The route that counts tokens keeps what stages of calls are promised: what fails at `elsewhere` there is told of."""

from __future__ import annotations

import httpx
import pytest
from lightning.gateway.http import RefusalError
from lightning.gateway.stages import CallStage, Line, NamedStage, PassOn
from lightning.types import UNSERVED, CallStatus
from starlette.types import Receive, Scope, Send

ROUTE = "/messages/count_tokens"
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
START = {"type": "http.response.start", "status": 200, "headers": []}


class Elsewhere(CallStage):
    """Fails when it is asked, before its answer or in the middle of it."""

    api = 1

    def __init__(self, when: str, error: Exception) -> None:
        self._when, self._error = when, error

    def elsewhere(self, route: str, model: object) -> PassOn:
        if self._when == "asked":
            raise self._error
        return self._answer

    async def _answer(self, payload: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        if self._when == "begun":
            await send(START)
        raise self._error


@pytest.fixture
def failing(build, monkeypatch: pytest.MonkeyPatch):
    """A gateway with such a stage."""

    async def make(when: str, error: Exception):
        line = Line([NamedStage("stranger", Elsewhere(when, error), "1", "stranger")])
        monkeypatch.setattr("lightning.gateway.gateway.line_of", lambda parts: line)
        return await build()

    return make


@pytest.mark.parametrize("when", ["asked", "answering", "begun"])
async def test_a_stages_failure_is_in_the_record_and_the_attempt_is_made_again(failing, warnings_of, when: str) -> None:
    house = await failing(when, KeyError("x"))
    http = await house.http()
    if when == "begun":
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post(ROUTE, json=ASKED)
    else:
        answer = await http.post(ROUTE, json=ASKED)
        assert answer.status_code == 500
        assert "The stage 'stranger' of the plugin 'stranger' failed on this call (elsewhere: KeyError)" in answer.text
    (told,) = await house.recorded()
    assert (told.status, told.finish_reason, "'stranger'" in told.error) == (CallStatus.ERROR, UNSERVED, True)
    assert not [said for said in warnings_of() if "Unexpected ASGI message" in said]


async def test_a_stages_refusal_is_recorded_and_has_the_shape_of_the_api(failing) -> None:
    house = await failing("answering", RefusalError(403, "not_yours", "Ask for another model."))
    answer = await (await house.http()).post(ROUTE, json=ASKED)
    assert (answer.status_code, answer.json()["type"]) == (403, "error")
    (told,) = await house.recorded()
    assert (told.status, told.finish_reason) == (CallStatus.REFUSED, "not_yours")


async def test_what_the_route_itself_refuses_is_not_recorded(build) -> None:
    house = await build()
    assert (await (await house.http()).post(ROUTE, json={"messages": 3})).status_code == 422
    assert await house.transitions() == []
