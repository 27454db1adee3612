"""Weights go through shared memory where it has room; what a killed run left there is removed, what a living one has is not."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import stat
from pathlib import Path

import pytest
from lightning.config.sections import PolicyServerConfig
from lightning.errors import PolicyServerError
from lightning.policy_server import weights as module
from lightning.policy_server.model_folder import hash_weights
from lightning.policy_server.weights import WeightsFolder
from safetensors.torch import load_file, save_file


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shared memory of the test's own."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(module, "SHARED", tmp_path / "shm")
    return tmp_path / "shm"


def test_it_is_this_users_alone_and_goes_with_the_run(
    shared: Path, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = WeightsFolder(PolicyServerConfig(), [model], tmp_path / "run")
    made = folder.path()
    assert made.parent == shared
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert folder.path() == made
    assert caplog.text.count("weights go through shared memory") == 1
    (made / "weights").write_text("x")
    folder.close()
    assert list(shared.iterdir()) == []
    folder.close()


def test_what_a_killed_run_left_is_removed_and_a_living_ones_is_not(shared: Path, model: Path, tmp_path: Path) -> None:
    living = WeightsFolder(PolicyServerConfig(), [model], tmp_path / "run")
    (shared / "lightning-weights-killed").mkdir()
    (shared / "lightning-weights-killed" / "version-1").write_text("x")
    kept = living.path()
    assert list(shared.iterdir()) == [kept]
    lock = os.open(kept, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
    next_one = WeightsFolder(PolicyServerConfig(), [model], tmp_path / "run")
    other = next_one.path()
    assert {*shared.iterdir()} == {kept, other}
    living.close()
    next_one.close()


@pytest.mark.parametrize(
    ("kind", "attach", "why", "level"),
    [
        ("auto", "", r"has room for 0\.00 GB, and .* GB are needed \(2\.2 x the weights\)", "INFO"),
        ("shared_memory", "", r"are needed .*Give /dev/shm more room \(docker run --shm-size\)", "WARNING"),
        ("auto", "http://gpu:8000", "may have a shared memory of its own", "INFO"),
        ("file", "", "weight_transfer is 'file'", "INFO"),
    ],
)
def test_where_it_has_no_room_a_file_is_taken_and_told(
    kind: str,
    attach: str,
    why: str,
    level: str,
    shared: Path,
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "free_memory", lambda: 1000)
    config = PolicyServerConfig.model_validate({"weight_transfer": kind, "attach": attach})
    folder = WeightsFolder(config, [model], tmp_path / "run")
    assert folder.path() == tmp_path / "run" / "weights"
    assert list(shared.iterdir()) == []
    (record,) = caplog.records
    assert record.levelname == level
    caplog.clear()
    assert folder.path().is_dir()
    assert not caplog.records
    assert re.search(why, record.getMessage())
    folder.close()
    assert (tmp_path / "run" / "weights").is_dir()


def test_the_digest_is_of_the_tensors_bytes_and_not_of_their_names(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    file = tmp_path / "w.safetensors"
    save_file(tensors, file, metadata={"some": "thing"})
    data = (model / "model.safetensors").read_bytes()
    own = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
    assert hash_weights(file) == hash_weights(model / "model.safetensors") == own
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 1
    save_file(tensors, file)
    assert hash_weights(file) != own
    with pytest.raises(PolicyServerError, match="cannot read the weights"):
        hash_weights(tmp_path / "absent")
