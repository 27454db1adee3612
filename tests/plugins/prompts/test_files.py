"""Files named by data stay below their root."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import DataError
from lightning_prompts import loop
from lightning_prompts.loop import inside

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
