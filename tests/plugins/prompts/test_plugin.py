"""Prompt optimisation is a plugin: what the core says where it is switched off or missing, and what still works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.algorithms.protocol import SearchAlgorithm
from lightning.config import load_config
from lightning.errors import ConfigError, PluginError
from lightning.installation import install_command
from lightning.plugins.manager import Plugins
from lightning.trainer import Trainer
from lightning.trainer.algorithm import resolve_algorithm
from lightning.types import Task
from lightning_debug.dev import try_algorithm

PIP = install_command("prompts")


def test_its_names_stand_where_they_are_documented() -> None:
    import lightning_prompts

    assert isinstance(lightning.APO(), lightning_prompts.PromptAlgorithm)
    assert isinstance(lightning.APO(), SearchAlgorithm)
    assert isinstance(resolve_algorithm("apo:rounds=2"), lightning.APO)


def test_its_class_is_no_algorithm_and_an_object_of_it_needs_no_groups_to_try(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is the class APO"):
        Trainer(tmp_path, lightning.APO)
    assert try_algorithm(lightning.APO(), []) == ([], [])


def test_settings_of_steps_are_not_for_a_search(warnings_of: Any) -> None:
    tasks = [Task("hello")]
    lightning.APO().check(load_config(env={}), tasks)
    assert warnings_of() == []
    lightning.APO().check(
        load_config(overrides=["trainer.patience=2", 'trainer.alerts=["command:true"]'], env={}), tasks
    )
    assert warnings_of() == ["a search for prompts does not use trainer.patience, trainer.alerts: leave it out"]
    with pytest.raises(ConfigError, match=r"samples in its own way, and trainer\.sampling is 'tree': leave it out"):
        lightning.APO().check(load_config(overrides=["trainer.sampling=tree"], env={}), tasks)


def test_switched_off_it_is_named_with_its_cure_and_the_rest_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "prompts")
    without = Plugins()
    with pytest.raises(PluginError, match="might have it, is disabled") as caught:
        without.algorithm("apo")
    assert PIP in str(caught.value)
    assert {"dpo", "grpo", "lightning_rl", "sft"} <= set(without.names("algorithms"))
    assert {info.name: info.state for info in without.plugins()}["prompts"] == "disabled"
    with pytest.raises(PluginError) as other:
        without.algorithm("nothing")
    assert "pip install" not in str(other.value)


def test_without_its_package_the_core_is_imported_and_names_the_cure(tmp_path: Path) -> None:
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lightning_prompts":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import lightning, lightning.trainer.trainer
try:
    lightning.APO
except ImportError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.count(PIP) == 1, ran.stdout + ran.stderr


def test_an_object_with_only_tune_is_told_what_to_derive_from() -> None:
    class Endings:
        name = "endings"

        async def tune(self, bench: object) -> None:
            """Never called."""

    with pytest.raises(ConfigError, match=r"derive its class from lightning_prompts\.PromptAlgorithm"):
        resolve_algorithm(Endings())  # type: ignore[arg-type]
