"""What the stage `traces` puts into outcomes, and what becomes of them without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from lightning.errors import StaleAttemptError, UnavailableError
from lightning.gateway.stages import Line, NamedStage
from lightning.plugins import Plugins
from lightning.runner.attempt_completion import report
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import Reply, ToolCall
from lightning.types import Outcome, Rollout, Run, Span, Task, Transition, logprobs, token_ids
from lightning_otel.traces.stage import TracesStage
from lightning_otel.traces.store import append_spans, spans

RUNS_SEARCH = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}


async def test_an_outcome_told_again_after_late_spans_is_the_one_that_was_taken() -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r0", "run", Task("x"), group="g")])
    (lease,) = await store.lease("run", "w")
    await store.append([Transition("r0", 1, 0, "c", token_ids([1]), token_ids([2]), logprobs([-0.5]))])
    line = Line([NamedStage("traces", TracesStage(cast("Any", SimpleNamespace(store=store))))])
    outcome = Outcome(reward=1.0, seconds=2.0)
    await append_spans(store, [Span("r0", 1, "f" * 32, "d" * 16, attributes=RUNS_SEARCH)])
    first = await report(store, lease.rollout.id, 1, outcome, line)
    await append_spans(store, [Span("r0", 1, "f" * 32, "e" * 16, attributes=RUNS_SEARCH)])
    assert await report(store, lease.rollout.id, 1, outcome, line) == first
    with pytest.raises(StaleAttemptError):
        await report(store, lease.rollout.id, 1, Outcome(reward=0.0, seconds=2.0), line)
    (ended,) = await store.attempts_of([("r0", 1)])
    assert [event.name for event in ended.tool_events] == ["search"], "what came later changes nothing"
    await store.close()


async def test_a_call_that_is_not_stored_leaves_no_tool_that_it_has_invented(build):
    """Its next try has another id, under which the same tool would be told again."""
    store = MemoryStore()
    house = await build(store=store)
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = {"messages": [{"role": "user", "content": "hi there"}], "tools": tools}
    for _ in range(2):
        house.fake.queue(Reply("", tool_calls=[ToolCall("divide", "{}", "bad")]))
    store.append = AsyncMock(side_effect=UnavailableError("the store is away"))
    http = await house.http()
    assert (await http.post("/chat/completions", json=asked)).status_code == 503
    assert await spans(store, "rollout-0") == []
    del store.append
    assert (await http.post("/chat/completions", json=asked)).status_code == 200
    assert [span.name for span in await spans(store, "rollout-0")] == ["execute_tool divide"]


def test_who_leaves_the_plugin_out_leaves_all_of_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The route, the stage of calls and the one around attempts."""
    kinds = ("routes", "call_stages", "attempt_stages")
    assert all("traces" in Plugins().names(kind) for kind in kinds)
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "otel-traces")
    assert not any("traces" in Plugins().names(kind) for kind in kinds)
