"""Every file that a user gives: UTF-8 with or without a mark is read, and anything else is refused by its name."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.cli.train import read_tasks
from lightning.config import load_config
from lightning.errors import ConfigError, LightningError
from lightning_branching.prompt_texts import read_prompt
from lightning_command.harbor import read_task
from lightning_deploy.sweep import read_sweep
from lightning_k8s.manifests import read_template
from lightning_planner.shape import KNOWN, read_shape
from lightning_resources.command import read_content
from lightning_resources.nouns import ResourceKind

TOML = 'title = "grün"\n'


def harbor(file: Path) -> object:
    (file.parent / "instruction.md").write_text("do")
    (file.parent / "tests").mkdir(exist_ok=True)
    (file.parent / "tests" / "test.sh").write_text("")
    return read_task(file.parent)


READERS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "tasks": ("tasks.jsonl", '{"input": "grün"}\n', read_tasks),
    "settings": ("lightning.toml", '[trainer]\nproject = "gruen"\n', load_config),
    "a resource": ("text.txt", "grün", lambda file: read_content(file, ResourceKind.PROMPT)),
    "a configuration": ("c.json", '{"a": "grün"}', lambda file: read_content(file, ResourceKind.CONFIG)),
    "a prompt": ("prompt.txt", "grün", read_prompt),
    "a sweep": ("sweep.toml", 'train = "--model m"\n', read_sweep),
    "a pod": ("pod.yaml", "metadata: {labels: {a: grün}}", lambda file: read_template(str(file))),
    "a task of Harbor": ("task.toml", TOML, harbor),
    "a model": ("config.json", json.dumps(next(iter(KNOWN.values()))), lambda file: read_shape(str(file.parent))),
}


@pytest.mark.parametrize("what", READERS)
def test_a_mark_of_windows_changes_nothing(what: str, tmp_path: Path) -> None:
    name, text, read = READERS[what]
    (tmp_path / name).write_text(text, encoding="utf-8")
    plain = read(tmp_path / name)
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert str(read(tmp_path / name)) == str(plain)


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "latin-1"])
@pytest.mark.parametrize("what", READERS)
def test_another_encoding_is_named_with_the_file(what: str, coding: str, tmp_path: Path) -> None:
    name, text, read = READERS[what]
    (tmp_path / name).write_bytes((text + " # ü").encode(coding))
    with pytest.raises(LightningError, match=f"{name} .*save it as UTF-8"):
        read(tmp_path / name)


def test_utf_32_is_no_utf_16(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_bytes(codecs.BOM_UTF32_LE + "a".encode("utf-32-le"))
    with pytest.raises(ConfigError, match="is UTF-32 text"):
        load_config(tmp_path / "t.toml")
