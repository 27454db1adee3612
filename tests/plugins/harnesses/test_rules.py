"""Rules `[untrained.NAME]`: which calls they have, and which settings are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lightning.config import load_config
from lightning.errors import ConfigError
from lightning.store.memory import MemoryStore
from lightning.types import Run

SETTINGS = (
    'untrained.mine.agents=["small"]',
    "untrained.mine.train=true",
    'untrained.helper.agents=["*/helper", "small"]',
    'untrained.helper.reason="helps"',
    'untrained.judge.models=["gpt-*"]',
    'untrained.judge.prompt="You grade"',
    "untrained.title.train=true",
)


async def asking(build: Any, *settings: str) -> Any:
    """Return a gateway for a run with these settings, and a function that asks as an agent and returns the recorded mark."""
    store = MemoryStore()
    await store.open()
    config = load_config(overrides=settings, env={}).model_dump(mode="json")
    await store.put_run(Run("run", "run", {"config": config}))
    house = await build(store=store)
    http = await house.http()

    async def ask(path: str, system: str = "", last: str = "hi there", model: str = "policy", **headers: str) -> str:
        names = path.split("/")
        caller = {"x-lightning-caller": json.dumps({"agent": names[-1], "path": names})}
        messages = [{"role": "system", "content": system or "You help."}, {"role": "user", "content": last}]
        answer = await http.post(
            "/chat/completions", json={"model": model, "messages": messages}, headers={**caller, **headers}
        )
        assert answer.status_code == 200, answer.text
        return (await house.transitions())[-1].untrained

    return ask


async def test_the_first_rule_that_matches_counts_and_what_the_agent_says_before_it(build: Any) -> None:
    ask = await asking(build, *SETTINGS)
    title = "You are a title generator. You output ONLY a thread title. Nothing else."
    assert await ask("writer") == ""
    assert await ask("team/helper") == "helps"
    assert await ask("small") == ""
    assert await ask("critic", model="gpt-5") == ""
    assert await ask("critic", "Now. You grade essays.", model="gpt-5") == "judge"
    assert await ask("critic", last="You grade essays.", model="gpt-5") == "judge"
    assert await ask("critic", last="Do You grade essays?", model="gpt-5") == ""
    assert await ask("writer", title) == ""
    assert await ask("writer", "Analyze if this message indicates a new conversation topic. If it does") == "topic"
    assert await ask("team/helper", **{"x-lightning-untrained": "its own"}) == "its own"


async def test_agents_and_models_narrow_a_known_rule_and_a_prompt_adds_to_it(build: Any) -> None:
    ask = await asking(
        build,
        'untrained.title.agents=["main"]',
        'untrained.topic.models=["gpt-*"]',
        'untrained.topic.prompt="New topic?"',
    )
    title, topic = (
        "You are a title generator. You output ONLY a thread title.",
        "Analyze if this message indicates a new",
    )
    topic += " conversation topic."
    assert [await ask("main"), await ask("main", title), await ask("other", title)] == ["", "title", ""]
    assert [await ask("main", topic), await ask("main", "New topic?")] == ["", ""]
    assert [await ask("main", said, model="gpt-5") for said in (topic, "New topic?", "")] == ["topic", "topic", ""]


REFUSED = [
    (["untrained.titel.train=true"], "[untrained.titel] matches no call; did you mean 'title'?"),
    (["untrained.x.reason=\"y\""], "matches no call. Set untrained.x.agents, untrained.x.models or untrained.x.prompt"),
    (['untrained.x.agents=["model:gpt"]'], "globs on models in untrained.x.models"),
    (['untrained.x.models=["!gpt"]'], "give a glob on the requested model"),
    (['untrained.x.prompt="  "'], "untrained.x.prompt is blank"),
    (['untrained.x.prompt="a"', f'untrained.x.reason="{"r" * 81}"'], "say in 1 to 80 printable ASCII characters"),
    (['untrained.x.prompt="a"', f'untrained.x.reason="{"r" * 75}"'], "with ', rejected' for rejected calls"),
    (['untrained.x.prompt="a"', 'untrained.y.prompt="b"', 'untrained.y.reason="x"'], "have the same reason 'x'"),
    (['untrained.x.prompt="a"', 'untrained.x.reason="title"'], "which is the reason of a known rule"),
    (["untrained.compaction.train=true", "untrained.compaction.train_accepted=true"], "has no effect with"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_settings_without_effect_are_refused(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(overrides=settings, env={})
    assert said in str(refused.value)
