"""Files named by data stay below their root, and nothing that comes over the wire or off the disk is unpickled."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import DataError
from lightning_prompts import loop
from lightning_prompts.paths import inside

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    file for room in ("core/lightning", "adapters", "plugins", "examples") for file in (ROOT / room).rglob("*.py")
)

NAMES = st.lists(st.sampled_from(["..", ".", "a", "b.txt", "", "~", "...", "a\0b", "C:"]), max_size=5).map("/".join)


@given(name=NAMES | st.text(max_size=20))
def test_a_name_leads_below_its_root_or_to_an_error(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.getbasetemp() / "root"
    try:
        file = inside(root, name)
    except DataError:
        return
    assert file != root
    assert file.is_relative_to(root)
    assert ".." not in file.parts
    assert file.resolve().is_relative_to(root.resolve())


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "", ".", "..", "a\0.txt", "..\\x", "a/.."])
def test_names_that_climb_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot name a file"):
        inside(tmp_path, name)


def test_symbolic_links_are_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "door").symlink_to(outside)
    (root / "file.txt").symlink_to(outside / "file.txt")
    for name in ("door/file.txt", "door", "file.txt"):
        with pytest.raises(DataError, match="symbolic link"):
            inside(root, name)
    assert inside(root, "real/file.txt") == root / "real" / "file.txt"


def test_a_component_writes_its_prompt_in_the_runs_folder_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert loop._write(run, "writer", "text").read_text() == "text"
    for name in ("../../writer", "/tmp/writer"):
        with pytest.raises(DataError):
            loop._write(run, name, "text")
    assert [file.name for file in tmp_path.rglob("*.txt")] == ["writer.txt"]


# pickle -------------------------------------------------------------------------------------------------------------
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "_pickle"}
UNSAFE = {"torch.load", "pandas.read_pickle", "eval", "exec", "yaml.load", "yaml.unsafe_load", "os.system"}
UNSAFE_SWITCHES = {"allow_pickle", "trust_remote_code", "shell"}
MAY_PICKLE = {"core/lightning/runner/agent_serialization.py"}
"""Packs the agent for processes of the one who started it."""
MAY_UNPACK = {
    "core/lightning/runner/agent_serialization.py",
    "core/lightning/runner/forkserver_child.py",
    "core/lightning/runner/worker.py",
}
"""The processes that run agents: not the trainer's, not the server's."""


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def texts(words: Collection[str]) -> Iterator[tuple[str, str]]:
    """The sources that have one of the words, by their place."""
    for file in SOURCES:
        text = file.read_text()
        if any(word in text for word in words):
            yield str(file.relative_to(ROOT)), text


def test_only_the_packing_of_agents_knows_pickle() -> None:
    found = {name for name, text in texts(PICKLES) if PICKLES & set(imports(ast.parse(text)))}
    assert found == MAY_PICKLE


def test_only_processes_of_agents_unpack_them() -> None:
    assert {name for name, _ in texts({"unpack_agent"})} == MAY_UNPACK


def test_nothing_loads_what_may_hold_code() -> None:
    found = []
    for place, text in texts({*UNSAFE, *UNSAFE_SWITCHES}):
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            switched = {keyword.arg for keyword in call.keywords if ast.unparse(keyword.value) == "True"}
            if name in UNSAFE or UNSAFE_SWITCHES & switched:
                found.append(f"{place}:{call.lineno}: {name}")
    assert found == []
