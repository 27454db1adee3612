"""Without the plugin a loop of one's own is refused with its cure, before anything is opened."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest
from lightning.errors import PluginError
from lightning.plugins import Plugins
from lightning.trainer import trainer as home


def test_a_session_is_refused_by_the_plugin_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    trainer = lightning.Trainer(tmp_path, out=tmp_path / "run", progress=False)
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "session")
    found = Plugins()
    monkeypatch.setattr(home, "plugins", lambda: found)
    said = (
        r"Trainer\.session needs a plugin that opens training loops of your own, and there is none\. "
        r"The plugin 'session' brings it\. Run: .*session.*The plugin 'session' .*, which might have it, is disabled"
    )
    with pytest.raises(PluginError, match=said):
        trainer.session(lambda task, llm: 1.0)
    assert not (tmp_path / "run").exists()
