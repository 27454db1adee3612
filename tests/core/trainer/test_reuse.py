"""`Trainer.fit` has no replay buffer."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest
from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.types import Task


def test_fit_refuses_what_it_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = with_settings(Config(), {"trainer.max_reuse": 1, "trainer.max_staleness": 2})
    trainer = lightning.Trainer(tmp_path, out=tmp_path / "run", config=settings, progress=False)
    with pytest.raises(ConfigError, match=r"Trainer.fit trains each rollout in one step.*Trainer.session"):
        trainer.fit(lambda task, llm: 0.0, [Task("one")])
    assert not (tmp_path / "run").exists()
