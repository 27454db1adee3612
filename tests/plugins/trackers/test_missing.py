"""A tracker whose library is not installed says which extra brings it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from lightning.config import Config
from lightning.errors import MissingExtraError
from lightning.installation import install_command
from lightning.plugins import plugins


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_it_says_which_extra_brings_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"lightning_trackers.{name}", raising=False)
    for variable in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"):
        monkeypatch.setenv(variable, "0")
    with pytest.raises(MissingExtraError, match=re.escape(install_command(name))):
        plugins().get("trackers", name)(Config()).start("run", {}, tmp_path)
