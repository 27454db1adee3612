"""The optimiser model's endpoint behaves badly in every way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from lightning.errors import ConfigError, LightningError, OptimizerError
from lightning_prompts import chat_model
from lightning_prompts.apo import APO
from lightning_prompts.chat_model import ChatClient
from lightning_prompts.protocol import OptimizerModel

ASK = [{"role": "user", "content": "Better?"}]


@dataclass
class Endpoint:
    """Answers with these, one after the other, the last for ever."""

    answers: list[Any]
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    at_once: int = 0
    most: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("authorization", ""))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                answer = "late"
            if isinstance(answer, int):
                return web.Response(
                    status=answer, text=f"no: {self.keys[-1]} was wrong", headers={"Retry-After": "0.01"}
                )
            if isinstance(answer, bytes):
                return web.Response(body=answer, content_type="application/json")
            return web.json_response({"choices": [{"message": {"content": answer}}]})
        finally:
            self.at_once -= 1


@pytest.fixture
async def endpoint(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Endpoint]:
    monkeypatch.setattr(chat_model, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("KEY", "the-key")
    made = Endpoint(["better"])
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/"
    yield made
    await runner.cleanup()


def asker(endpoint: Endpoint, **changes: Any) -> ChatClient:
    return ChatClient(
        OptimizerModel("m", endpoint.url, **{"api_key_env": "KEY", "timeout": 0.2, "attempts": 3, **changes})
    )


async def test_one_question_one_answer(endpoint: Endpoint) -> None:
    assert await asker(endpoint, temperature=0.5).ask(ASK) == "better"
    assert endpoint.asked == [{"model": "m", "messages": ASK, "temperature": 0.5}]
    assert endpoint.keys == ["Bearer the-key"]


async def test_a_temperature_of_none_is_not_sent(endpoint: Endpoint) -> None:
    await asker(endpoint, temperature=None).ask(ASK)
    assert endpoint.asked == [{"model": "m", "messages": ASK}]


async def test_without_a_key_none_is_sent(endpoint: Endpoint) -> None:
    await asker(endpoint, api_key_env="NO_SUCH_VARIABLE").ask(ASK)
    await asker(endpoint, api_key_env="").ask(ASK)
    assert endpoint.keys == ["", ""]


@pytest.mark.parametrize("trouble", [500, 503, 429, 408, 1.0, b"not json"])
async def test_what_may_pass_is_tried_again(endpoint: Endpoint, trouble: Any) -> None:
    endpoint.answers = [trouble, trouble, "better"]
    assert await asker(endpoint).ask(ASK) == "better"
    assert len(endpoint.asked) == 3


@pytest.mark.parametrize(("trouble", "words"), [(500, "status 500"), (1.0, "no answer within 0.2 s")])
async def test_in_the_end_it_is_given_up(endpoint: Endpoint, trouble: Any, words: str) -> None:
    endpoint.answers = [trouble]
    with pytest.raises(OptimizerError, match=rf"'m' at .* did not answer in 3 attempts; the last: {words}"):
        await asker(endpoint).ask(ASK)
    assert len(endpoint.asked) == 3


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_what_no_question_would_get_past_ends_the_run_and_names_what_to_check(
    endpoint: Endpoint, status: int
) -> None:
    endpoint.answers = [status]
    with pytest.raises(ConfigError, match="environment variable KEY") as caught:
        await asker(endpoint).ask(ASK)
    assert len(endpoint.asked) == 1
    assert "the-key" not in str(caught.value)


@pytest.mark.parametrize("answer", [400, 413, b"{}", b'{"choices": []}', b'{"error": "x"}', b"[]"])
async def test_a_question_that_is_refused_costs_only_itself(endpoint: Endpoint, answer: Any) -> None:
    endpoint.answers = [answer]
    with pytest.raises(OptimizerError):
        await asker(endpoint).ask(ASK)
    assert len(endpoint.asked) == 1


async def test_half_a_character_is_no_text(endpoint: Endpoint) -> None:
    endpoint.answers = [b'{"choices": [{"message": {"content": "so \\ud83d"}}]}']
    assert await asker(endpoint).ask(ASK) == "so ?"


async def test_a_key_with_the_end_of_its_line_is_the_key(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "the-key\n")
    await asker(endpoint).ask(ASK)
    assert endpoint.keys == ["Bearer the-key"]


async def test_silence_is_an_empty_answer(endpoint: Endpoint) -> None:
    endpoint.answers = [None]
    assert await asker(endpoint).ask(ASK) == ""


async def test_nobody_listens(endpoint: Endpoint) -> None:
    with pytest.raises(OptimizerError, match="did not answer in 1 attempts"):
        await ChatClient(OptimizerModel("m", "http://127.0.0.1:9/v1", attempts=1)).ask(ASK)


async def test_no_more_questions_at_once_than_allowed(endpoint: Endpoint) -> None:
    endpoint.answers = [0.02]
    made = asker(endpoint, concurrency=3)
    await asyncio.gather(*(made.ask(ASK) for _ in range(9)))
    assert endpoint.most == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "m"},
        {"model": "m", "base_url": "api.openai.com"},
        {"model": "m", "base_url": "http://x/v1", "attempts": 0},
        {"model": "m", "base_url": "http://x/v1", "temperature": -0.5},
        {"model": "m", "base_url": "http://x/v1", "api_key": "sk-123"},
        {"model": "m", "base_url": "http://x/v1", "api_key_env": "sk-123"},
        {"model": "m", "base_url": "http://me:sk-123@x/v1"},
        {"model": "m", "base_url": "http://x/v1?key=sk-123"},
    ],
)
def test_an_optimiser_model_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        APO("writer", optimizer=wrong)
    assert "sk-123" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"rounds": 0}, {"beam_width": -1}, {"selection": "best"}, {"exploration": -1.0}, {"selection_rollouts": 0}],
)
def test_a_search_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LightningError, match=next(iter(wrong))):
        APO("writer", **wrong)
