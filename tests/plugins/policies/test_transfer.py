"""The adapters of several policies in one vLLM: its arguments, its names, the files that it gets, and the sum on a CPU."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from lightning.config import LoraConfig
from lightning.errors import ConfigError, PolicyServerError
from lightning.policy_server.control import VLLMControl
from lightning.policy_server.model_folder import LORA_A, LORA_B, POLICIES, check_weights, read_header, read_metadata
from lightning.policy_server.weights import FromDisk
from lightning.testing.tiny_models import make_tiny_model
from lightning_attach.transfer import LocalSender, OverNetwork
from lightning_policies.transfer import CURES, PolicyAdapters
from lightning_policies.worker import _linear_of, replace_adapters
from safetensors.numpy import save_file

EVERYWHERE, SOME = LoraConfig(rank=4), LoraConfig(rank=12, target_modules=("self_attn.q_proj", "down_proj"))
MATRIX = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def transfer(model: Path, **trained: LoraConfig) -> PolicyAdapters:
    return PolicyAdapters(FromDisk(), model, trained or {"writer": EVERYWHERE, "editor": SOME}, ["judge", "base"])


def after(args: Sequence[str], flag: str) -> list[str]:
    """The values of a flag."""
    found = list(args[args.index(flag) + 1 :])
    return found[: next((n for n, word in enumerate(found) if word.startswith("--")), len(found))]


class Control:
    """Notes what is loaded."""

    def __init__(self) -> None:
        self.loaded: list[Path] = []

    async def load(self, files: Sequence[Path]) -> None:
        self.loaded += files


def policies_file(file: Path, tensors: Mapping[str, Any], *policies: str) -> Path:
    save_file(
        dict(tensors), file, metadata={POLICIES: json.dumps({name: {"scaling": {MATRIX: 2.0}} for name in policies})}
    )
    return file


def adapter(policy: str, matrix: str = MATRIX, size: int = 64) -> dict[str, Any]:
    zeros = np.zeros((4, size), np.float32)
    return {f"{policy}|{matrix}{LORA_A}": zeros, f"{policy}|{matrix}{LORA_B}": zeros.T.copy()}


def test_vllm_has_an_adapter_for_each_trained_policy_in_the_order_of_their_names(model: Path) -> None:
    made = transfer(model)
    args = made.args("policy-1")
    assert [after(args, f"--{flag}") for flag in ("max-loras", "max-cpu-loras", "max-lora-rank")] == [
        ["2"],
        ["2"],
        ["16"],
    ]
    assert "--enable-lora" in args
    assert "--lora-target-modules" not in args, "one of the policies has adapters on all linear layers"
    modules = [json.loads(each) for each in after(args, "--lora-modules")]
    assert [each["name"] for each in modules] == ["policy-1/editor", "policy-1/writer"]
    assert made.models("policy-1") == [
        ("editor", "policy-1/editor"),
        ("writer", "policy-1/writer"),
        ("judge", "policy-1"),
        ("base", "policy-1"),
    ]
    again = [json.loads(each) for each in after(made.args("policy-2"), "--lora-modules")]
    assert [each["name"] for each in again] == ["policy-2/editor", "policy-2/writer"]
    assert [each["path"] for each in again] == [each["path"] for each in modules]
    assert after(transfer(model, editor=SOME).args("p"), "--lora-target-modules") == ["down_proj", "q_proj"]


def test_the_adapters_of_the_start_are_zero_and_name_the_modules_of_the_settings(model: Path) -> None:
    made = transfer(model)
    editor, writer = (
        Path(json.loads(each)["path"]) / "adapter_model.safetensors" for each in after(made.args("p"), "--lora-modules")
    )
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in read_header(editor)} == {"q_proj", "down_proj"}
    assert len(read_header(writer)) == 2
    assert not np.any(np.frombuffer(writer.read_bytes()[-8:], np.uint8))
    del made
    gc.collect()
    assert not writer.exists(), "the folders go with the transfer"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model: transfer(model, writer=LoraConfig(rank=600)),
            "'writer' have rank 600, and vLLM takes 512 at most",
        ),
        (
            lambda model: PolicyAdapters(OverNetwork("gloo", LocalSender(), 1.0), model, {"writer": EVERYWHERE}, []),
            "policy_server.weight_transfer sends whole weights",
        ),
        (lambda model: transfer(model).check(None), "policy_server.attach names a vLLM that was not started for"),
        (
            lambda model: transfer(model, writer=LoraConfig(target_modules=("c_attn",))).check("cpu"),
            r"has no layer for an adapter.*\(c_attn\)",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_start(
    model: Path, make: Callable[[Path], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(model)


async def test_the_base_model_is_never_replaced(model: Path, tmp_path: Path) -> None:
    made, control = transfer(model), Control()
    asked = cast("VLLMControl", control)
    file = policies_file(tmp_path / "file", adapter("writer") | adapter("editor"), "writer", "editor")
    await made.load(asked, [file])
    await made.load(asked, [model / "model.safetensors"])
    assert control.loaded[0] == file
    untrained = json.loads(read_metadata(control.loaded[1])[POLICIES])
    assert set(untrained) == {"writer", "editor"}
    whole = tmp_path / "whole"
    save_file({"x": np.zeros(1)}, whole)
    with pytest.raises(PolicyServerError, match="other weights would change the base model for all policies"):
        await made.load(asked, [whole])
    assert len(control.loaded) == 2


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (adapter("writer") | adapter("editor"), ""),
        (adapter("writer"), "has no adapters of the policy 'editor'"),
        (
            adapter("writer") | adapter("editor", size=32),
            "the policy 'editor' in .* has an adapter for .*q_proj.* does not fit",
        ),
        (
            adapter("writer") | adapter("editor") | adapter("judge"),
            r"tensor 'judge\|.*, which is of none of its policies",
        ),
    ],
)
def test_the_adapters_of_each_policy_must_fit_the_model(
    model: Path, tmp_path: Path, tensors: dict[str, Any], message: str
) -> None:
    file = policies_file(tmp_path / "file", tensors, "writer", "editor")
    if not message:
        check_weights(file, model)
        return
    with pytest.raises(PolicyServerError, match=message):
        check_weights(file, model)


def test_a_file_of_other_policies_than_vllm_has_is_refused(tmp_path: Path) -> None:
    file = policies_file(tmp_path / "file", adapter("writer"), "writer")
    manager = SimpleNamespace(_adapter_manager=SimpleNamespace(lora_slots=2))
    with pytest.raises(RuntimeError, match="has the policies writer, and vLLM was started for 2"):
        replace_adapters(manager, str(file))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_get_their_own_adapter_and_others_none(dtype: torch.dtype) -> None:
    """vLLM's function for a CPU takes the last adapter for the rows without one."""
    random = torch.Generator().manual_seed(0)

    def matrices(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    downs, ups, widths = [matrices(2, 1, 3, 8) for _ in range(2)], [matrices(2, 1, 5, 3), matrices(2, 1, 2, 3)], [5, 2]
    x, y = matrices(7, 8), matrices(7, 7)
    adapters, lengths = [-1, 1, 0, -1], [2, 1, 3, 1]
    starts = [0, 2, 3, 6]
    metadata = [torch.tensor(each) for each in (starts, lengths, adapters)]
    wrapper = SimpleNamespace(no_lora=False, prefill_metadata=(*metadata, 4, 3, 7))
    wanted = y.float().clone()
    for row, each in enumerate([-1, -1, 1, 0, 0, 0, -1]):
        if each >= 0:
            parts = [
                x[row].float() @ down[each, 0].float().T @ up[each, 0].float().T
                for down, up in zip(downs, ups, strict=True)
            ]
            wanted[row] += torch.cat(parts)
    found = y.clone()
    _linear_of(wrapper)(found, x, downs, ups, 1.0, widths)
    assert torch.equal(found[[0, 1, 6]], y[[0, 1, 6]])
    torch.testing.assert_close(found, wanted.to(dtype))
    assert not torch.equal(found, y)
    wrapper.no_lora = True
    _linear_of(wrapper)(found, x, downs, ups, 1.0, widths)
    torch.testing.assert_close(found, wanted.to(dtype))


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ("GPT2LMHeadModel does not support LoRA yet.", "train one policy"),
        ("While loading /a, expected target modules in {'q_proj'} but received ['z'].", "Name modules that vLLM has"),
        ("When using LoRA, vocab size must be <= 258048", "instead of all-linear"),
    ],
)
def test_what_helps_where_vllm_cannot_add_adapters_is_known(said: str, cure: str) -> None:
    assert [cure in told for error, told in CURES if re.search(error, said)] == [True]
