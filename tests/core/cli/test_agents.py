"""The agent that a command line names: found, or refused with the line of the user's own that has to be mended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lightning.cli.output import load_agent
from lightning.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_an_agent_of_the_current_folder_is_found(folder: Path) -> None:
    (folder / "found_here.py").write_text("class Agents:\n    @staticmethod\n    def run(task, llm): return 1.0\n")
    assert load_agent("found_here:Agents.run")(None, None) == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import json\n\njson.loads('no')\n",
            r"broken_here\.py:3: JSONDecodeError: Expecting value.*inside the agent.*--debug",
        ),
        ("\ndef run(task, llm:\n", r"broken_here\.py:2: SyntaxError"),
        ("import nothing_of_that_name\n", "cannot import 'broken_here'.*nothing_of_that_name"),
        ("run = 1\n", "is a int, not something that can be called"),
        ("", "has no 'run'"),
    ],
)
def test_a_module_that_does_not_import_is_told_with_its_line(folder: Path, source: str, said: str) -> None:
    (folder / "broken_here.py").write_text(source)
    with pytest.raises(ConfigError, match=said):
        load_agent("broken_here:run")


def test_what_names_no_agent_is_refused() -> None:
    for name in ("module", ":run", "module:"):
        with pytest.raises(ConfigError, match="write MODULE:FUNCTION"):
            load_agent(name)


def test_a_file_is_refused_with_the_name_of_its_module() -> None:
    with pytest.raises(ConfigError, match=r"write my_app\.vowels:run$"):
        load_agent("./my_app/vowels.py:run")
