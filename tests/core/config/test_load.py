"""Settings come from three places, the later wins, and every mistake is told with its place and its cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.config import Config, LoraConfig, load_config, settings, with_settings
from lightning.config.plugin_settings import config_model
from lightning.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "lightning.toml"
    file.write_text(text)
    return file


def refused(**sources) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"env": {}, **sources})
    return str(caught.value)


def test_without_any_source_the_defaults_hold() -> None:
    assert load_config(env={}) == config_model()()


def test_the_later_source_wins_key_by_key(tmp_path: Path) -> None:
    file = write(tmp_path, "[trainer]\nsteps = 1\nseed = 1\ntasks_per_step = 1\n[engine.lora]\nrank = 4\nalpha = 8.0\n")
    env = {
        "LIGHTNING_TRAINER__STEPS": "2",
        "LIGHTNING_TRAINER__SEED": "2",
        "LIGHTNING_ENGINE__LORA__RANK": "2",
        "HOME": "/",
    }
    config = load_config(file, ["trainer.steps=3"], env)
    assert (config.trainer.steps, config.trainer.seed, config.trainer.tasks_per_step) == (3, 2, 1)
    assert config.engine.lora == LoraConfig(rank=2, alpha=8.0)


def test_values_are_toml_and_bare_words_are_strings() -> None:
    given_ = [
        "engine.device=cuda:1",
        "engine.dtype='bfloat16'",
        "engine.betas=[0.8, 0.9]",
        "engine.lr=1e-3",
        "engine.gradient_checkpointing=true",
        "trainer.trackers=['jsonl']",
        "runner.adapters=[]",
        "policy_server.attach=http://127.0.0.1:8000",
        "policy_server.tool_call_parser=",
        "gateway.override_sampling.top_p=0.9",
        "gateway.override_sampling={temperature=1}",
        "engine.lora={}",
    ]
    config = load_config(overrides=given_, env={})
    assert (config.engine.device, config.engine.dtype, config.engine.betas) == ("cuda:1", "bfloat16", (0.8, 0.9))
    assert config.engine.lr == 1e-3
    assert config.engine.gradient_checkpointing is True
    assert config.trainer.trackers == ("jsonl",)
    assert config.runner.adapters == ()
    assert config.policy_server.attach == "http://127.0.0.1:8000"
    assert config.policy_server.tool_call_parser == ""
    assert config.gateway.override_sampling == {"temperature": 1}
    assert config.engine.lora == LoraConfig()


def test_null_takes_a_value_away(tmp_path: Path) -> None:
    file = write(tmp_path, "[trainer]\neval_temperature = 0.0\n[engine.lora]\nrank = 4\n")
    config = load_config(file, ["trainer.eval_temperature=null", "engine.lora=null"], {})
    assert config.trainer.eval_temperature is None
    assert config.engine.lora is None


def test_an_empty_table_empties_a_free_mapping_and_changes_nothing_in_a_section(tmp_path: Path) -> None:
    file = write(tmp_path, "[runner]\nprompts = {writer = 'Write.'}\n[engine.lora]\nrank = 4\n")
    config = load_config(file, ["runner.prompts={}", "engine.lora={}"], {})
    assert config.runner.prompts == {}
    assert config.engine.lora == LoraConfig(rank=4)


@pytest.mark.parametrize("given", ["runner.tool_limits={search = 0}", "runner.tool_limits.search=0"])
def test_a_tool_with_less_than_one_slot_is_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match=r"runner\.tool_limits\.search cannot be 0; it accepts .* integers >= 1"):
        load_config(None, [given], {})
    assert load_config(None, ["runner.tool_limits.search=1"], {}).runner.tool_limits == {"search": 1}


def test_variables_that_are_not_settings_are_left_alone() -> None:
    env = {"LIGHTNING_DISABLE_PLUGINS": "a,b", "LIGHTNING_CLOUD_URL": "elsewhere", "LIGHTNING": "1"}
    assert load_config(env=env) == config_model()()


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_TRAINER__STEPS", "7")
    assert load_config().trainer.steps == 7


def test_a_config_can_be_derived() -> None:
    base = load_config(overrides=["trainer.steps=5", "engine.lora.rank=3"], env={})
    derived = with_settings(base, {"trainer.seed": 9, "trainer.trackers": ("jsonl",), "engine.lora.alpha": 1.0})
    assert (derived.trainer.steps, derived.trainer.seed, derived.trainer.trackers) == (5, 9, ("jsonl",))
    assert derived.engine.lora == LoraConfig(rank=3, alpha=1.0)
    assert base.trainer.seed == 0
    assert with_settings(base, {"engine.lora": LoraConfig(rank=7)}).engine.lora == LoraConfig(rank=7)
    with pytest.raises(ConfigError, match=r"settings: unknown setting 'trainer\.stepz'; did you mean 'trainer\.steps'"):
        with_settings(base, {"trainer.stepz": 1})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.stpes=3", "unknown setting 'trainer.stpes'; did you mean 'trainer.steps'?"),
        ("steps=3", "unknown setting 'steps'; did you mean 'trainer.steps'?"),
        ("lora.rank=3", "did you mean 'engine.lora.rank'?"),
        ("wandb.entity=x", "Sections are: trainer, engine, policy_server, gateway, runner, budget, opt"),
        ("runner.zzzzzz=1", "[runner] has: concurrency, timeout"),
        ("trainer.steps.more=1", "unknown setting 'trainer.steps.more'"),
        ("trainer..steps=1", "unknown setting 'trainer..steps'"),
        ("engine.lora={rnk=1}", "unknown setting 'engine.lora.rnk'; did you mean 'engine.lora.rank'?"),
        ("gateway.override_sampling.a.b=1", "unknown setting 'gateway.override_sampling.a.b'"),
        ("trainer.steps=-1", "trainer.steps cannot be -1; it accepts an integer >= 0"),
        ("trainer.steps=true", "trainer.steps cannot be true; it accepts an integer >= 0"),
        ('trainer.steps="3"', 'trainer.steps cannot be "3"; it accepts an integer >= 0'),
        ("trainer.steps=1.5", "trainer.steps cannot be 1.5; it accepts an integer >= 0"),
        ("trainer.steps=many", 'trainer.steps cannot be "many"; it accepts an integer >= 0'),
        ("trainer.steps=null", "trainer.steps cannot be null; it accepts an integer >= 0"),
        ("trainer.trackers=jsonl", 'trainer.trackers cannot be "jsonl"; it accepts a list of strings'),
        ("trainer.eval_temperature=warm", "it accepts a number >= 0, or null"),
        ("engine.dtype=float16", 'engine.dtype cannot be "float16"; it accepts "auto" or "float32" or "bfloat16"'),
        ("engine.betas=[1.0]", "engine.betas cannot be [1.0]; it accepts a list of 2 numbers"),
        ("engine.lr=nan", "engine.lr cannot be nan; it accepts a number > 0"),
        ("engine.lora.dropout=0.1", "unknown setting 'engine.lora.dropout'"),
        ("engine.lora.target_modules=[1]", 'cannot be [1]; it accepts a list of strings or "all-linear"'),
        ("engine.device=2026-01-01", "engine.device cannot be 2026-01-01; it accepts a string"),
        ("engine=fast", 'engine cannot be "fast"; it accepts a table'),
        ("gateway.override_sampling={temperature=true}", "it accepts a table of names and numbers"),
        ("trainer.steps=[1", "[1 is not a TOML value"),
        ("trainer.steps", "write --set section.field=value"),
        ("=3", "write --set section.field=value"),
    ],
)
def test_a_mistake_names_its_place_and_its_cure(override: str, said: str) -> None:
    text = refused(overrides=[override])
    assert f"--set {override}" in text
    assert said in text


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "[trainer]\nstepps = 1\n")
    text = refused(file=file, overrides=["engine.lrr=1"], env={"LIGHTNING_RUNNER__TIMOUT": "3"})
    assert f"{file}: unknown setting 'trainer.stepps'; did you mean 'trainer.steps'?" in text
    assert "the environment variable LIGHTNING_RUNNER__TIMOUT: unknown setting 'runner.timout'" in text
    assert "--set engine.lrr=1: unknown setting 'engine.lrr'; did you mean 'engine.lr'?" in text
    values = refused(file=write(tmp_path, "[trainer]\nsteps = -1\n"), overrides=["engine.lr=0"]).splitlines()
    assert len(values) == 2


def test_a_value_is_blamed_on_the_source_that_won(tmp_path: Path) -> None:
    file = write(tmp_path, "[trainer]\nsteps = 1\n")
    env = {"LIGHTNING_TRAINER__STEPS": "-1"}
    assert refused(file=file, env=env).startswith("the environment variable LIGHTNING_TRAINER__STEPS: trainer.steps")


def test_one_underscore_is_not_taken_for_two() -> None:
    text = refused(env={"LIGHTNING_TRAINER_STEPS": "3"})
    assert "LIGHTNING_TRAINER_STEPS sets nothing: write LIGHTNING_TRAINER__STEPS" in text


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "lightning.toml cannot be read: No such file" in refused(file=tmp_path / "lightning.toml")
    assert "line 2" in refused(file=write(tmp_path, "[trainer]\nsteps = = 1\n"))
    (tmp_path / "lightning.toml").write_bytes(b"\xff")
    assert "is not UTF-8 text" in refused(file=tmp_path / "lightning.toml")


def test_every_setting_can_be_given_its_default_in_every_way(tmp_path: Path) -> None:
    known = [
        setting
        for setting in settings()
        if setting.default != "null" and not setting.key.startswith("engine.lora.") and ".NAME." not in setting.key
    ]
    assert len(known) > 30
    overrides = [f"{setting.key}={setting.default}" for setting in known]
    env = {f"LIGHTNING_{setting.key.upper().replace('.', '__')}": setting.default for setting in known}
    file = write(tmp_path, "\n".join(f"{setting.key} = {setting.default}" for setting in known))
    assert (
        load_config(overrides=overrides, env={})
        == load_config(env=env)
        == load_config(file, env={})
        == config_model()()
    )


def test_a_table_of_tables_is_given_whole_or_key_by_key(tmp_path: Path) -> None:
    file = write(tmp_path, '[gateway.providers.judge]\nbase_url = "https://host/v1"\nmodels = ["gpt-4o*"]\n')
    keys = ["gateway.providers.judge.base_url=https://host/v1", 'gateway.providers.judge.models=["gpt-4o*"]']
    whole = ['gateway.providers={judge = {base_url = "https://host/v1", models = ["gpt-4o*"]}}']
    expected = {"judge": {"base_url": "https://host/v1", "models": ("gpt-4o*",)}}
    for config in (
        load_config(file, env={}),
        load_config(overrides=keys, env={}),
        load_config(overrides=whole, env={}),
    ):
        told = config.gateway.providers  # type: ignore[attr-defined]  # of a plugin
        assert {name: each.model_dump(exclude_defaults=True) for name, each in told.items()} == expected
    both = load_config(file, overrides=["gateway.providers.judge.api_key_env=KEY"], env={})
    assert both.gateway.providers["judge"].base_url == "https://host/v1"
    assert "unknown setting 'gateway.providers.judge.api_key'" in refused(
        overrides=["gateway.providers.judge.api_key=sk-1"]
    )
    assert "gateway.providers.judge.models cannot be 3" in refused(overrides=["gateway.providers.judge.models=3"])


@given(
    steps=st.integers(0, 2**40),
    lr=st.floats(1e-12, 1e3),
    device=st.text(st.characters(codec="utf-8", exclude_categories=["C"])),
    trackers=st.lists(st.text("abc"), max_size=3),
)
def test_what_is_set_is_what_is_read(steps: int, lr: float, device: str, trackers: list[str]) -> None:
    values = {"trainer.steps": steps, "engine.lr": lr, "engine.device": device, "trainer.trackers": tuple(trackers)}
    config = with_settings(Config(), values)
    read = (config.trainer.steps, config.engine.lr, config.engine.device, config.trainer.trackers)
    assert read == tuple(values.values())


@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_any_text_is_a_setting_or_a_config_error(text: str) -> None:
    try:
        load_config(overrides=[text], env={})
    except ConfigError:
        return
    assert text.partition("=")[0].strip() in {setting.key for setting in settings()}


@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_any_value_is_accepted_or_a_config_error(text: str) -> None:
    for key in ("trainer.steps", "engine.device", "trainer.trackers", "engine.lora", "gateway.override_sampling"):
        try:
            config = load_config(overrides=[f"{key}={text}"], env={})
        except ConfigError:
            continue
        assert config_model().model_validate_json(config.model_dump_json()) == config
