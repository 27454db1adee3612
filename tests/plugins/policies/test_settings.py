"""The settings `[policies.NAME]`: their sources, their record, and what is refused when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.config import (
    Config,
    LoraConfig,
    load,
    load_config,
    plugin_settings,
    recorded_config,
    settings,
    with_settings,
)
from lightning.errors import ConfigError
from lightning.plugins import Plugins, plugins
from lightning.trainer.runs import check_run
from lightning.types import Run, StepRecord
from lightning_policies.config import PoliciesConfig, PolicyConfig

WRITER = 'policies.writer.agents=["writer"]'
JUDGE = 'policies.judge.agents=["judge"]'


def loaded(*overrides: str, file: Path | None = None, env: dict[str, str] | None = None) -> dict[str, PolicyConfig]:
    return dict(PoliciesConfig.of(load_config(file, overrides, env or {})).by_name)


def refused(*overrides: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(overrides=overrides, env=env or {})
    return str(error.value)


def test_policies_come_from_each_source_and_merge_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[policies.writer]\nagents = ["sql/writer"]\nlr = 1e-4\n\n[policies.writer.lora]\nrank = 8\n')
    env = {"LIGHTNING_POLICIES__JUDGE__AGENTS": '["judge"]'}
    found = loaded("policies.writer.lr=2e-4", "policies.judge.train=false", file=file, env=env)
    assert found == {
        "writer": PolicyConfig(agents=("sql/writer",), lr=2e-4, lora=LoraConfig(rank=8)),
        "judge": PolicyConfig(agents=("judge",), train=False),
    }
    assert list(found) == ["writer", "judge"]
    assert loaded('policies={writer = {agents = ["sql/writer"]}}') == {"writer": PolicyConfig(agents=("sql/writer",))}
    given = with_settings(Config(), {"policies": {"writer": {"models": ["gpt-*"]}}, "policies.writer.lr": 1e-3})
    assert PoliciesConfig.of(given).by_name == {"writer": PolicyConfig(models=("gpt-*",), lr=1e-3)}
    assert PoliciesConfig.of(with_settings(given, {"trainer.steps": 3})) == PoliciesConfig.of(given)


def test_a_run_records_its_policies() -> None:
    record = load_config(overrides=[WRITER, "policies.writer.lora.rank=4"], env={}).model_dump(mode="json")
    assert record["policies"]["writer"]["lora"]["rank"] == 4
    config, unknown = recorded_config(record)
    assert (PoliciesConfig.of(config).by_name["writer"].lora, unknown) == (LoraConfig(rank=4), [])
    record["policies"]["writer"]["later"] = 1
    assert recorded_config(record)[1] == ["policies.writer.later"]


def test_each_key_is_listed_once_with_name_for_a_policy() -> None:
    listed = {each.key: each for each in settings() if each.key.startswith("policies.")}
    assert [*listed] == [
        *(f"policies.NAME.{key}" for key in ("agents", "models", "base", "lora")),
        *(f"policies.NAME.lora.{key}" for key in ("rank", "alpha", "target_modules")),
        *(f"policies.NAME.{key}" for key in ("lr", "train")),
    ]
    assert listed["policies.NAME.lr"].accepts == "a number > 0, or null"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('policies.writer.agent=["a"]', "unknown setting 'policies.writer.agent'; did you mean 'policies.writer.agents'?"),
        ("policies.writer={lrs=1.0}", "unknown setting 'policies.writer.lrs'; did you mean 'policies.writer.lr'?"),
        ("policies.writer.lora.rnk=8", "unknown setting 'policies.writer.lora.rnk'; did you mean 'policies.writer.lora.rank'?"),
        ('policys.writer.agents=["a"]', "unknown setting 'policys.writer.agents'; did you mean 'policies.writer.agents'?"),
        ('policies.agents=["a"]', "unknown setting 'policies.agents'; did you mean 'policies.NAME.agents'?"),
        ("policies.writer=3", "policies.writer cannot be 3; it accepts a table"),
        ("policies.writer.lr=0.0", "policies.writer.lr cannot be 0.0; it accepts a number > 0, or null"),
        ('policies.writer.agents="a"', 'policies.writer.agents cannot be "a"; it accepts a list of strings'),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named(override: str, said: str) -> None:
    assert refused(override) == f"--set {override}: {said}"


def test_a_wrong_variable_is_named() -> None:
    said = refused(env={"LIGHTNING_POLICIES__WRITER__AGNTS": "[]"})
    assert said.startswith("the environment variable LIGHTNING_POLICIES__WRITER__AGNTS: unknown setting")
    assert said.endswith("did you mean 'policies.writer.agents'?")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["policies.writer={}"], "[policies.writer] has no agents: set policies.writer.agents"),
        (["policies.writer.lr=0.1"], "[policies.writer] has no agents"),
        (['policies.policy.agents=["a"]'], "[policies.policy]: 'policy' names the single policy of a run"),
        (['policies.base.agents=["a"]'], "[policies.base]: 'base' names the untrained model"),
        (['policies.adapters.agents=["a"]'], "[policies.adapters]: 'adapters' names the folder"),
        (['policies.sql-writer.agents=["a"]'], "a policy's name has letters, digits and underscores alone"),
        (['policies.2.agents=["a"]'], "no digit first"),
        (['policies.écrit.agents=["a"]'], "a policy's name has letters"),
        (['policies.a.agents=["!"]'], "policies.a.agents has '!', which matches no agent"),
        (['policies.a.agents=["model:gpt-*"]'], "only globs on agents belong there, globs on models in policies.a.models"),
        (['policies.a.models=["!gpt-*"]'], "policies.a.models has '!gpt-*': give a glob on the requested model"),
        ([WRITER, "policies.writer.base=other/model"], "needs servers of its own, which this release does not start yet"),
        ([WRITER, JUDGE, "policies.judge.train=false", "policies.judge.lr=0.1"], "policies.judge.lr has no effect with"),
        ([WRITER, JUDGE, "policies.judge.train=false", "policies.judge.lora={}"], "policies.judge.lora has no effect with"),
        ([WRITER, "policies.writer.train=false"], "no policy is trained: train = false for policies.writer"),
        ([WRITER, 'policies.b.agents=["a", "writer"]'], "policies.writer.agents and policies.b.agents both have 'writer'"),
        ([WRITER, 'policies.b.agents=["w*"]'], "take it out there with '!writer' in policies.b.agents"),
        (['policies.b.agents=["*"]', WRITER], "take it out there with '!writer' in policies.b.agents"),
        ([WRITER, 'policies.b.agents=["sql/writer"]'], "the agent 'sql/writer' of policies.b.agents belongs to"),
        (['policies.a.models=["m"]', 'policies.b.models=["m"]'], "policies.a.models and policies.b.models both have 'm'"),
        (['policies.a.models=["m-1"]', 'policies.b.models=["m-*"]'], "the model 'm-1' of policies.a.models belongs to"),
    ],
)  # fmt: skip
def test_policies_that_cannot_be_are_refused_with_the_cure(overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)


@pytest.mark.parametrize("key", ["policies.writer.lr=0.5", "trainer.policy_turns=writer:1"])
def test_without_the_plugin_its_settings_are_refused_by_its_name(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "policies")
    found = Plugins()
    for module in (load, plugin_settings):
        monkeypatch.setattr(module, "plugins", lambda: found)
    said = f"unknown setting {key.partition('=')[0]!r}. The plugin 'policies' brings it."
    assert said in refused(key)


def test_what_a_glob_takes_out_may_be_another_policys() -> None:
    assert len(loaded(WRITER, 'policies.b.agents=["*", "!writer"]')) == 2
    assert (
        len(loaded('policies.a.agents=["sql/*"]', 'policies.b.agents=["*/writer"]')) == 2
    )  # only some agents have both


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ([WRITER, 'policies.writer.agents=["other"]'], ["agents"]),
        ([WRITER, "policies.writer.lora.rank=4"], ["lora.alpha", "lora.rank", "lora.target_modules"]),
        ([], ["agents", "models", "train"]),
        ([WRITER, "policies.writer.lr=0.5"], []),
    ],
)
async def test_a_resumed_run_keeps_its_policies_but_for_their_rates(
    steps: int, overrides: list[str], changed: list[str]
) -> None:
    def described(*overrides: str) -> Any:
        config = load_config(overrides=overrides, env={}).model_dump(mode="json")
        return {"model": "m", "engine": "torch", "config": config, "head": ""}

    async with plugins().opened_store("memory://") as store:
        run = await store.put_run(Run("run", "run", described(WRITER)))
        for step in range(1, steps + 1):
            await store.commit_step(StepRecord("run", step, step, (), (), ""))
        assert await check_run(store, "run", described(WRITER), resume=True) == run
        if not changed:
            assert await check_run(store, "run", described(*overrides), resume=True) == run
            return
        with pytest.raises(ConfigError) as refusal:
            await check_run(store, "run", described(*overrides), resume=True)
    names = ", ".join(f"policies.writer.{key}" for key in changed)
    assert f"the calls of run 'run' were answered under other settings of {names}: " in str(refusal.value)
    assert str(refusal.value).endswith("--from run@2" if steps else "give another `out`")
