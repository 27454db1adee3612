"""A credit function of the plugin is refused with its cure where the plugin is not there; those of the core go on."""

from __future__ import annotations

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.config import Config
from lightning.credit import identical
from lightning.errors import PluginError
from lightning.plugins import Plugins
from lightning.trainer import algorithm, model

EXTRA = r"The plugin 'credits' brings it\. Run: .*credits.*The plugin 'credits' .*, which might have it, is disabled"
NAMES = ("agent-turn", "branch", "critic", "gigpo", "intermediate", "leave-one-out", "weighted", "weighted-variance")


@pytest.fixture(autouse=True)
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "credits")
    found = Plugins()
    for module in (algorithm, model):
        monkeypatch.setattr(module, "plugins", lambda: found)


@pytest.mark.parametrize("name", NAMES)
def test_its_credit_functions_are_refused_by_name(name: str) -> None:
    with pytest.raises(PluginError, match=f"there is no credit '{name}'.*{EXTRA}"):
        algorithm.resolve_algorithm(LightningRL(credit=name))


def test_ppo_is_refused_with_the_same_cure() -> None:
    with pytest.raises(PluginError, match=f"there is no credit 'critic'.*{EXTRA}"):
        algorithm.resolve_algorithm("ppo")


def test_the_head_of_a_recorded_run_is_refused_with_the_same_cure() -> None:
    with pytest.raises(PluginError, match=f"there is no head 'critic'.*{EXTRA}"):
        model.made_head(Config(), "critic on a frozen trunk")


def test_the_credits_of_the_core_go_on() -> None:
    made = algorithm.resolve_algorithm("grpo")
    assert algorithm.credit_of(made) is identical
