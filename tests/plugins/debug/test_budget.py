"""A run ends after the step at which its budget is spent, and goes on with a larger one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.outside_requests import OUTSIDE
from lightning.trainer.stages import StepTaken
from lightning.trainer.summary import Evaluation
from lightning.trainer.trainer import refuse_ends
from lightning.types import CallStatus
from lightning_debug.budget import SpentBudget, budget
from lightning_debug.config import BudgetConfig
from lightning_debug.judge import JudgeModel
from lightning_prompts.chat_model import ChatClient
from lightning_record.config import ProviderConfig

from tests.core.gateway.conftest import build, house  # noqa: F401 — fixtures


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    OUTSIDE.begin(None, "")
    yield
    OUTSIDE.begin(None, "")


async def run(bench: Any, folder: Path, said: list[str], **settings: Any) -> tuple[int, list[float], list[str]]:
    """Train; return the steps taken, what each sampled, and what was said of the end."""
    said.clear()
    async with bench(folder, **settings) as made:
        made.loop.reporter.say = said.append
        await made.loop.run({})
        records = await made.store.steps("run")
        assert made.loop.writer.newest == made.loop.done == len(records), "the last step has its checkpoint"
    sampled = [
        record.metrics["budget/sampled_tokens"] for record in records if "budget/sampled_tokens" in record.metrics
    ]
    return len(records), sampled, [text for text in said if text.startswith("stopped")]


async def test_a_run_ends_when_its_budget_is_spent_and_goes_on_with_a_larger_one(bench: Any, tmp_path: Path) -> None:
    said: list[str] = []
    settings = {"trainer__tasks_per_step": 2, "trainer__checkpoint_every": 1}
    steps, sampled, told = await run(bench, tmp_path / "run", said, **settings, budget__sampled_tokens=1)
    assert (steps, len(sampled)) == (1, 1)
    assert told[0] == (
        f"stopped after step 1: spent {sampled[0]:,.0f} sampled tokens, and budget.sampled_tokens is 1; go on with --resume "
        "and a larger budget (--set budget.sampled_tokens=N). The held-out tasks were last run after step 0, and the weights "
        "have changed since: evaluate them with `lightning eval RUN@1 MODULE:FUNCTION --tasks HELD_OUT.jsonl`"
    )
    again = await run(bench, tmp_path / "run", said, **settings, budget__sampled_tokens=1)
    assert again[0] == 1, "nothing more is spent under the same limit"
    limit = int(sampled[0]) + 1
    steps, sampled, told = await run(bench, tmp_path / "run", said, **settings, budget__sampled_tokens=limit)
    assert (steps, sum(sampled) >= limit) == (2, True)
    assert f"spent {sum(sampled):,.0f} sampled tokens" in told[0], "earlier steps count"
    assert (await run(bench, tmp_path / "run", said, **settings))[::2] == (3, [])


async def test_time_and_trained_tokens(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    stage = SpentBudget(BudgetConfig(seconds=30, trained_tokens=100), lambda: now[0])
    await stage.begun([{"budget/seconds": 12.0, "budget/trained_tokens": 40.0}], ())
    now[0] = 17.0
    added = await stage.taken(StepTaken(2, [], [], None, {"tokens": 59.0}))  # type: ignore[arg-type]
    assert added.metrics == {"sampled_tokens": 0.0, "trained_tokens": 59.0, "seconds": 17.0, "requests": 0.0}
    assert stage.ends() == ""
    now[0] = 18.0
    await stage.taken(StepTaken(3, [], [], None, {"tokens": 0.0}))  # type: ignore[arg-type]
    assert stage.ends().startswith("spent 30 seconds, and budget.seconds is 30;")
    assert "eval" not in stage.ends(), "no held-out tasks were given"
    await stage.evaluated([Evaluation(2, 0.5, 4, 0)])
    assert stage.ends().endswith(
        "since: evaluate them with `lightning eval RUN@3 MODULE:FUNCTION --tasks HELD_OUT.jsonl`"
    )
    await stage.evaluated([Evaluation(3, 0.5, 4, 0)])
    assert "eval" not in stage.ends()
    assert caplog.text == ""
    await stage.begun([{"tokens": 5.0}], ())
    assert "1 earlier step was taken without a budget" in caplog.text


async def test_requests_beyond_the_limit_are_refused_and_not_made() -> None:
    asked: list[object] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"choices": [{"message": {"content": "yes"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        model = JudgeModel("j", str(server.make_url("/v1")), "", attempts=1)
        stage = SpentBudget(BudgetConfig(requests=3))
        await stage.begun([{"budget/seconds": 1.0, "budget/requests": 1.0}], ())
        client = ChatClient(model)
        assert [await client.ask([]) for _ in range(2)] == ["yes", "yes"]
        with pytest.raises(
            model.failure, match=r"request of the judge 'j' was refused: .* made 3 .*budget\.requests is 3"
        ):
            await client.ask([])
        assert len(asked) == 2
        added = await stage.taken(StepTaken(2, [], [], None, {}))  # type: ignore[arg-type]
        assert added.metrics["requests"] == 2.0
        assert "spent 3 requests of judges, optimizers and providers" in stage.ends()
        await stage.ended()
        assert await client.ask([]) == "yes", "another run has its own limit"


async def test_a_providers_request_beyond_the_limit_is_an_infrastructure_fault(build: Any) -> None:  # noqa: F811
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"choices": [{"message": {"content": "yes"}}]})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as server:
        config = ProviderConfig(base_url=str(server.make_url("/v1")), models=("gpt-4o*",))
        made = await build(providers={"judge": config})
        OUTSIDE.begin(2, "budget.requests is 2")
        http = await made.http(await made.llm())
        body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
        answers = [
            await http.post(route, json=body)
            for route in ("/chat/completions", "/embeddings", "/chat/completions", "/embeddings")
        ]
    assert [reply.status_code for reply in answers] == [200, 200, 503, 503]
    assert asked == ["/v1/chat/completions", "/v1/embeddings"]
    assert "and budget.requests is 2" in json.dumps(answers[2].json())
    (refused,) = await made.transitions()
    assert refused.status is CallStatus.ERROR


def test_a_budget_stands_where_it_is_set_and_is_refused_where_nothing_asks_it() -> None:
    assert budget(Config()) is None
    config = with_settings(Config(), {"budget.seconds": 5})
    assert budget(config) is not None
    refuse_ends(Config(), "a search for prompts")
    with pytest.raises(ConfigError, match=r"the stage 'budget' of the plugin 'debug' ends .* in a search for prompts"):
        refuse_ends(config, "a search for prompts")
