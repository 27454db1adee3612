"""Opening a model: what is wrong with the folder, the device or the installation is said at once."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.batch.sample import Sample
from lightning.config import Config, EngineConfig, LoraConfig
from lightning.engines.loading import read_model
from lightning.engines.plugin import torch_engine
from lightning.engines.protocol import Engine, Opening, OptimizerConfig, SharesBase
from lightning.engines.torch.engine import TorchEngine
from lightning.engines.torch.model import AddingEmbedding, AddingLinear
from lightning.errors import EngineError, MissingExtraError
from lightning.installation import install_command
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.plugins import plugins
from safetensors.torch import load_file, save_file
from torch import nn

Open = Callable[..., TorchEngine]


def copy_of(model: Path, target: Path) -> Path:
    return Path(shutil.copytree(model, target))


def test_a_folder_that_is_no_model_is_named(open_engine: Open, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nothing-here is not a model folder: it has no config\.json"):
        open_engine(tmp_path / "nothing-here")


def test_broken_weights_are_named(open_engine: Open, model: Path, tmp_path: Path) -> None:
    folder = copy_of(model, tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(EngineError, match=r"cannot load a causal language model from .*broken"):
        open_engine(folder)


def test_missing_weights_are_never_made_up(open_engine: Open, model: Path, tmp_path: Path) -> None:
    folder = copy_of(model, tmp_path / "holes")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"1 tensors are missing .*model\.layers\.0\.mlp\.up_proj\.weight"):
        open_engine(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(model: Path) -> None:
    with pytest.raises(EngineError, match=r"engine\.device = 'cuda:1', but torch sees 0 CUDA devices"):
        TorchEngine(device="cuda:1").open(model, OptimizerConfig(), seed=0)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")],
    ids=["torch", "driver"],
)
def test_a_model_that_memory_has_no_room_for_names_the_cures(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(
        EngineError, match=r"out of memory while loading .* onto cpu: .*gpu_memory_utilization.*engine\.lora"
    ):
        open_engine()


@pytest.mark.parametrize(("device", "message"), [("gpu", "is not a device"), ("meta", "trains on cpu or cuda")])
def test_an_impossible_device(model: Path, device: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        TorchEngine(device=device).open(model, OptimizerConfig(), seed=0)


def test_an_unknown_dtype(model: Path) -> None:
    with pytest.raises(EngineError, match=r"engine\.dtype = 'float8' is unknown"):
        TorchEngine(device="cpu", dtype="float8").open(model, OptimizerConfig(), seed=0)


def test_methods_before_open_say_what_to_do(tmp_path: Path) -> None:
    engine = TorchEngine()
    for call in (
        lambda: engine.logprobs([]),
        lambda: engine.values([]),
        lambda: engine.step([], ClippedPolicyGradient(correction=NO_CORRECTION)),
        lambda: engine.save(tmp_path / "x"),
        lambda: engine.weights(tmp_path / "x"),
    ):
        with pytest.raises(EngineError, match=r"call open\(\) first"):
            call()
    engine.close()


def test_the_plugin_passes_every_setting() -> None:
    section = EngineConfig(
        dtype="bfloat16",
        device="cpu",
        threads=3,
        tokens_per_microbatch=7,
        gradient_checkpointing=True,
        lora=LoraConfig(),
        step="tree",
    )
    engine = plugins().engine("torch")(Config(engine=section))
    assert isinstance(engine, TorchEngine)
    assert (engine._dtype, engine._device_name, engine._threads, engine._budget) == ("bfloat16", "cpu", 3, 7)
    assert (engine._gradient_checkpointing, engine._lora) == (True, LoraConfig())
    assert engine._kind == "tree"
    as_protocol: Engine = engine
    as_protocol.close()


def test_a_missing_transformers_is_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        MissingExtraError, match=rf"'transformers' is not installed.*{re.escape(install_command('torch'))}"
    ):
        torch_engine(Config())


def test_a_missing_peft_is_a_missing_extra(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match="'peft' is not installed"):
        open_engine(lora=LoraConfig())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_what_is_trained_adds_its_gradients_up_in_place(
    open_engine: Callable[..., TorchEngine], lora: LoraConfig | None
) -> None:
    engine = open_engine(lora=lora)
    layers = [module for module in engine._opened().model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    in_place = [isinstance(module, AddingLinear | AddingEmbedding) for module in layers]
    assert in_place == [module.weight.requires_grad for module in layers]
    assert any(in_place)


def test_engines_of_adapters_share_the_tensors_of_their_base(open_engine: Open, tied_model: Path) -> None:
    lora, other = LoraConfig(rank=4), LoraConfig(rank=2, target_modules=("q_proj",))
    first, second = (TorchEngine(device="cpu", lora=each, gradient_checkpointing=True) for each in (lora, other))
    first.open_sharing(tied_model, Opening(OptimizerConfig(), 0), [(second, Opening(OptimizerConfig(), 1))])
    base, beside = (
        {
            name.replace(".base_layer.", "."): tensor.data_ptr()
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if ".lora_" not in name
        }
        for model in (first._opened().model, second._opened().model)
    )
    assert base == beside
    assert len(base) > 20
    alone = open_engine(tied_model, lora=other, seed=1)
    assert alone._parameters.keys() == second._parameters.keys()
    for name, value in alone._parameters.items():
        assert torch.equal(value, second._parameters[name])
    first.close()
    row = np.arange(1, 9, dtype=np.int32)
    sample = Sample(row, *(np.zeros(8, np.float32) for _ in range(3)), np.full(8, -1, np.int32), ())
    np.testing.assert_array_equal(second.logprobs([sample])[0], alone.logprobs([sample])[0])
    second.close()


def test_only_adapters_share_a_base(tied_model: Path) -> None:
    own = Opening(OptimizerConfig(), 0)
    adapters, whole = (TorchEngine(device="cpu", lora=lora) for lora in (LoraConfig(rank=2), None))
    assert isinstance(whole, SharesBase)
    for engine, other in ((adapters, whole), (whole, adapters), (whole, whole)):
        with pytest.raises(EngineError, match=r"only adapters share a base model: set engine\.lora"):
            engine.open_sharing(tied_model, own, [(other, own)])


def test_random_numbers_that_loading_draws_change_no_adapters(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = open_engine(lora=LoraConfig(rank=2))._parameters

    def drawing(folder: Path, **how: object) -> nn.Module:
        torch.rand(3)
        return read_model(folder, **how)

    monkeypatch.setattr("lightning.engines.torch.model.read_model", drawing)
    for name, value in open_engine(lora=LoraConfig(rank=2))._parameters.items():
        assert torch.equal(value, expected[name])
