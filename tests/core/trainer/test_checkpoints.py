"""Checkpoints never run ahead of the committed steps."""

from pathlib import Path

from lightning.trainer.checkpoints import Checkpoints


def _make(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep=2)
    for step in steps:
        checkpoints.path(step).mkdir(parents=True)
    return checkpoints


def test_the_newest_that_was_committed_is_used(tmp_path: Path) -> None:
    checkpoints = _make(tmp_path, 1, 2, 3)
    assert checkpoints.newest(2) == 2
    assert checkpoints.newest(0) is None


def test_uncommitted_ones_are_discarded(tmp_path: Path) -> None:
    checkpoints = _make(tmp_path, 1, 2, 3)
    checkpoints.discard_after(2)
    assert checkpoints.steps() == [1, 2]


def test_only_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = _make(tmp_path, 1, 2, 3, 4)
    checkpoints.prune(3)
    assert checkpoints.steps() == [2, 3, 4]


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    checkpoints = _make(tmp_path, 1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-x").mkdir()
    assert checkpoints.steps() == [1]
    assert Checkpoints(tmp_path / "absent", 2).steps() == []
