"""An algorithm that has a teacher is refused by the plugin's name where nobody finds the teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning import Distill
from lightning.errors import ConfigError
from lightning.plugins import Plugins, stages

from tests.core.trainer.test_tiny_run import train as train


def test_a_teacher_is_refused_before_anything_is_started(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "finetuning")
    found = Plugins()
    monkeypatch.setattr(stages, "plugins", lambda: found)
    named = (
        r"the algorithm distill learns from the teacher parent@1, and no plugin is there that carries it out: .* The plugin "
        r"'finetuning' brings it\. .* is disabled: .*Bring the plugin back, or take another algorithm to go on without it"
    )
    with pytest.raises(ConfigError, match=named):
        train("student", 1, algorithm=Distill("parent@1"))
    assert not (tmp_path / "student" / "run.json").exists()
    train("student", 1)
