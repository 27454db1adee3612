"""Weight files are judged before a server is paused for them."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import MissingExtraError, PolicyServerError
from lightning.policy_server.model_folder import (
    TensorSpec,
    check_model_folder,
    check_weights,
    checkpoint_files,
    folder_tensors,
    read_header,
)
from safetensors.torch import save_file

Alter = Callable[[Path, Callable[[dict[str, torch.Tensor]], object]], Path]
NORM = "model.norm.weight"


def test_without_safetensors_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match=r"'safetensors' is not installed\. Run: pip install .*\[torch\]"):
        read_header(tmp_path / "x.safetensors")


def test_header_is_read_as_safetensors_writes_it(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(5, dtype=torch.bfloat16),
        "c": torch.zeros((), dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert read_header(tmp_path / "x.safetensors") == {
        "a": TensorSpec("F32", (2, 3)),
        "b": TensorSpec("BF16", (5,)),
        "c": TensorSpec("I64", ()),
    }


def test_good_weights_pass(model: Path, tied_model: Path, alter: Alter) -> None:
    check_weights(model / "model.safetensors", model)
    check_weights(alter(model, lambda t: t.update({NORM: t[NORM].bfloat16()})), model)
    check_weights(tied_model / "model.safetensors", tied_model)


def test_a_tied_head_may_be_there_or_not(model: Path, tied_model: Path, alter: Alter) -> None:
    embedding = "model.embed_tokens.weight"
    check_weights(alter(tied_model, lambda t: t.update({"lm_head.weight": t[embedding].clone()})), tied_model)
    with pytest.raises(PolicyServerError, match=r"lm_head.*shape"):
        check_weights(alter(tied_model, lambda t: t.update({"lm_head.weight": t[embedding][1:].clone()})), tied_model)
    with pytest.raises(PolicyServerError, match=r"lacks 'lm_head\.weight'"):
        check_weights(alter(model, lambda t: t.pop("lm_head.weight")), model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), "lacks 'model.norm.weight'"),
        (lambda t: [t.pop(name) for name in list(t)[:6]], "and 3 more tensors"),
        (lambda t: t.update(extra=torch.zeros(1)), "has 'extra', which the model"),
        (lambda t: t.update({NORM: torch.ones(63)}), r"shape \(63,\).*has \(64,\)"),
        (lambda t: t.update({NORM: torch.ones(64, dtype=torch.int32)}), "is I32.*has F32"),
    ],
)
def test_weights_that_do_not_fit(
    model: Path, alter: Alter, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    with pytest.raises(PolicyServerError, match=message):
        check_weights(alter(model, change), model)


def test_missing_weights(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyServerError, match=r"cannot read the weights .*nothing"):
        check_weights(tmp_path / "nothing", model)


@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused_wherever_it_was_cut(
    model: Path, tmp_path_factory: pytest.TempPathFactory, cut: float
) -> None:
    whole = (model / "model.safetensors").read_bytes()
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    path.write_bytes(whole[: int(len(whole) * cut)])
    with pytest.raises(PolicyServerError, match=r"cut\.safetensors"):
        read_header(path)


@given(junk=st.binary(max_size=200))
def test_junk_is_refused(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.safetensors"
    path.write_bytes(junk)
    with pytest.raises(PolicyServerError, match=r"junk\.safetensors"):
        read_header(path)


@pytest.mark.parametrize(
    "header",
    [[], {"a": 1}, {"a": {}}, {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
     {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
     {"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}],
)  # fmt: skip
def test_a_malformed_header_is_refused(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(PolicyServerError, match="header does not parse"):
        read_header(tmp_path / "x")


def test_sharded_folders(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = tmp_path / "sharded"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    shards = {"one.safetensors": names[:10], "two.safetensors": names[10:]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_model_folder(folder)
    assert [path.name for path in checkpoint_files(folder)] == sorted(shards)
    assert folder_tensors(folder) == folder_tensors(model)
    check_weights(model / "model.safetensors", folder)


@pytest.mark.parametrize(
    ("gone", "message"),
    [("config.json", "lacks config.json"), ("tokenizer.json", "lacks a tokenizer"), ("model.safetensors", "lacks weights")],
)  # fmt: skip
def test_incomplete_model_folders(model: Path, tmp_path: Path, gone: str, message: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    (folder / gone).unlink()
    with pytest.raises(PolicyServerError, match=f"{message}.*save_pretrained"):
        check_model_folder(folder)


def test_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(PolicyServerError, match=r"there is no model folder .*nowhere; give"):
        check_model_folder(tmp_path / "nowhere")


def test_a_broken_config_is_named(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(PolicyServerError, match=r"cannot read .*config\.json"):
        check_model_folder(folder)
