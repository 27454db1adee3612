"""What is asked for by name and needs the plugin is refused with its cure where the plugin is not there; all else goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer
from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.plugins import Plugins, stages
from lightning.trainer import samplers

from tests.tiny_families import make_tiny_family

EXTRA = r"The plugin 'samplers' brings it\. Run: .*samplers.*The plugin 'samplers' .*, which might have it, is disabled"


@pytest.fixture(autouse=True)
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "samplers")
    found = Plugins()
    for module in (samplers, stages):
        monkeypatch.setattr(module, "plugins", lambda: found)


@pytest.mark.parametrize(
    ("settings", "recorded", "said"),
    [
        (
            {"trainer.max_staleness": 2},
            None,
            r"trainer\.max_staleness is 2, and no plugin is there that carries it out",
        ),
        ({"trainer.order": "learnable"}, None, r"trainer\.order = 'learnable' is neither 'shuffled' nor 'given'"),
        ({}, "runs/one", r"recorded \(--recorded\) is 'runs/one', and no plugin is there that carries it out"),
    ],
)
def test_what_needs_the_plugin_is_refused_before_anything_starts(
    tmp_path: Path, settings: dict[str, Any], recorded: str | None, said: str
) -> None:
    model, config = make_tiny_family(tmp_path / "model", "llama2"), with_settings(Config(), settings)
    trainer = Trainer(model, "grpo", out=tmp_path / "run", config=config, recorded=recorded)
    with pytest.raises(ConfigError, match=f"{said}.*{EXTRA}"):
        trainer.fit(lambda task, llm: 1.0, [] if recorded else ["a task"])
    assert not (tmp_path / "run").exists()


async def test_sampling_in_turns_goes_on(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", trainer__steps=1) as made:
        await made.loop.run({})
        assert len(await made.store.steps("run")) == 1
