"""Where a plugin stands in the gateway: an API of its own, and what else answers on the port."""

from __future__ import annotations

import pytest
from lightning.errors import GatewayError, PluginError
from lightning.gateway import gateway
from lightning.plugins import Plugins

ASK = '''
import lightning
from lightning.gateway.dialects import Chat
from starlette.responses import PlainTextResponse


class Ask(Chat):
    """`{"q": ...}` is answered `{"a": ...}`."""

    path, id_prefix = "/ask", "ask-"

    def translate(self, body, before, response_id):
        return {"model": body.get("model"), "messages": [{"role": "user", "content": body["q"]}]}, Answer()


class Answer:
    def whole(self, reply):
        return {"a": reply["choices"][0]["message"]["content"]}

    def conversation(self):
        return None


class Elsewhere(Ask):
    path = "/other"


@lightning.hookimpl
def register_dialects(register):
    register("PATH", lambda config: DIALECT())


@lightning.hookimpl
def register_routes(register):
    register("ROUTE", lambda parts: PlainTextResponse(str(parts.config.hosted_tools)))
'''


@pytest.fixture
def stranger(install, monkeypatch: pytest.MonkeyPatch):
    """A plugin that speaks an API and answers a route, found as an installed one is."""

    def make(path: str = "ask", dialect: str = "Ask", route: str = "ask/how", name: str = "stranger") -> None:
        source = ASK.replace("PATH", path).replace("DIALECT", dialect).replace("ROUTE", route)
        install(f"{name}-dialect", {name: f"{name}_dialect"}, {f"{name}_dialect": source})
        found = Plugins()
        monkeypatch.setattr(gateway, "plugins", lambda: found)

    return make


async def test_a_strangers_api_is_spoken_and_recorded_and_its_route_answers(stranger, build) -> None:
    stranger()
    house = await build()
    http = await house.http()
    answer = (await http.post("/ask", json={"q": "hello", "model": "policy"})).json()
    (call,) = await house.recorded()
    assert answer["a"]
    assert call.id.startswith("ask-")
    assert len(call.response_ids) > 0
    assert (await http.post("/ask/how", json={})).text == "refuse"
    assert "POST /v1/ask, " in (await http.get("/ask/what")).json()["error"]["message"]


async def test_an_api_that_fails_on_a_request_is_named_and_nothing_is_asked(stranger, build, warnings_of) -> None:
    stranger()
    house = await build()
    answer = await (await house.http()).post("/ask", json={"question": "hello"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "gateway_fault")
    assert "a call of /ask, which stranger_dialect brings: see its log" in answer.text
    assert "the gateway failed on a call of /ask, which stranger_dialect brings" in warnings_of()
    assert [asked for asked in house.fake.requests if "completions" in asked.path] == []


WATCHED = """
import lightning
from starlette.responses import PlainTextResponse

heard = []


def broken(token, claims, issued):
    raise ValueError("gone")


async def close():
    heard.append("closed")


@lightning.hookimpl
def register_routes(register):
    def route(parts):
        parts.identity.watch(broken)
        parts.identity.watch(lambda token, claims, issued: heard.append((token, claims, issued)))
        parts.closing.push_async_callback(close)
        return PlainTextResponse(f"{parts.store.__class__.__name__} {parts.shared}")

    register("watched", route)
"""


async def test_a_route_hears_of_keys_and_is_closed_with_the_gateway(install, build, monkeypatch, warnings_of) -> None:
    install("watcher", {"watcher": "watcher"}, {"watcher": WATCHED})
    found = Plugins()
    monkeypatch.setattr(gateway, "plugins", lambda: found)
    house = await build()
    llm = await house.llm(sampling={"temperature": 0.5})
    http = await house.http(llm)
    assert (await http.post("/watched")).text == "MemoryStore False"
    assert (await http.get("/models")).status_code == (await http.get("/models")).status_code == 200
    heard = __import__("watcher").heard
    assert [(token, issued) for token, _, issued in heard] == [(llm.api_key, True), (llm.api_key, False)]
    (claims,) = {(claims.rollout, claims.attempt, claims.sampling["temperature"]) for _, claims, _ in heard}
    assert claims == ("rollout-0", 1, 0.5)
    assert [text.endswith("failed on a key of rollout-0") for text in warnings_of()] == [True, True]
    await house.gateway.close()
    await house.gateway.close()
    assert heard[2:] == ["closed"]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"dialect": "Elsewhere"}, "the dialect 'ask' for /other: each has its own path"),
        ({"path": "chat/completions"}, "the dialect 'chat/completions' for /ask"),
        ({"route": "responses"}, "the route 'responses', which the gateway answers already"),
        ({"route": "models"}, "the route 'models', which the gateway answers already"),
    ],
)
async def test_what_is_answered_already_is_refused_by_its_name(stranger, build, named, said: str) -> None:
    stranger(**named)
    with pytest.raises(GatewayError, match=said):
        await build()


async def test_two_plugins_of_one_path_are_both_named(stranger, build) -> None:
    stranger()
    stranger(name="second")
    with pytest.raises(PluginError, match=r"two plugins register the dialect 'ask': .*(second|stranger)"):
        await build()


async def test_without_the_plugin_its_apis_are_not_there(build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "dialects")
    found = Plugins()
    monkeypatch.setattr(gateway, "plugins", lambda: found)
    house = await build()
    answer = await (await house.http()).post("/responses", json={"input": "hello"})
    assert (answer.status_code, "POST /v1/chat/completions" in answer.text) == (404, True)
