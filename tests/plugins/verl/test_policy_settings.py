"""Policies that verl's workers train, and those that they refuse by name, before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from lightning.config import Config, with_settings
from lightning.engines.protocol import ChecksModel
from lightning.errors import ConfigError
from lightning.plugins import plugins


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"policies.a.lora.rank": 2},
            r"all weights of the policy b are trained, .*policies\.b\.lora\.rank .*engine = torch",
        ),
        (
            {"engine.lora.rank": 2, "policies.b.base": "other"},
            r"begin as different models \(a as the run's model, b as other\): .*or set engine = torch",
        ),
        (
            {"engine.lora.rank": 2, "engine.verl.strategy": "megatron"},
            r"megatron trains all weights.* a, b: set .* fsdp2",
        ),
        (
            {"engine.lora.rank": 2, "engine.verl.model": {"lora_adapter_path": "x"}},
            r"engine\.verl\.model\.lora_adapter_path .*leave it out",
        ),
        ({"engine.lora.rank": 2, "policies.b.lora.alpha": 1.5}, r"policy b: policies\.b\.lora\.alpha is 1\.5: verl"),
    ],
    ids=["whole", "bases", "megatron", "adapter", "alpha"],
)
def test_policies_that_one_model_cannot_train_are_refused_before_anything_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], message: str
) -> None:
    shutil.copytree(model, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    given = {f"policies.{name}.agents": [name] for name in "ab"} | settings
    engine = plugins().engine("verl")(with_settings(Config(), {"engine.device": "cpu", **given}))
    assert isinstance(engine, ChecksModel)
    with pytest.raises(ConfigError, match=message):
        engine.check(model)


def test_one_trained_policy_may_have_a_model_of_its_own(model: Path, tmp_path: Path) -> None:
    """Those that are not trained need no workers."""
    other = str(shutil.copytree(model, tmp_path / "other"))
    given = {
        "policies.a.agents": ["a"],
        "policies.b.agents": ["b"],
        "policies.b.train": False,
        "policies.b.base": other,
    }
    engine = plugins().engine("verl")(with_settings(Config(), {"engine.device": "cpu", **given}))
    assert isinstance(engine, ChecksModel)
    assert engine.check(model) == ""
