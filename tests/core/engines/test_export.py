"""What leaves the engine: folders and files that others load, with the weights the engine computes with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.batch.sample import Sample
from lightning.config import LoraConfig
from lightning.engines import export
from lightning.engines.export import whole_weights, write_adapters, write_file, write_folder
from lightning.engines.files import write_tensors
from lightning.engines.loading import add_adapters
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import EngineError, PolicyServerError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.policy_server.model_folder import check_weights, hash_weights, weight_tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen3Config

from tests.live_bytes import Bytes

Open = Callable[..., TorchEngine]
Make = Callable[..., Sample]


def trained(engine: TorchEngine, make_row: Make) -> Sample:
    row = make_row(16, [(4, 16, 1.0, 0.1)])
    for _ in range(3):
        engine.step([row], ClippedPolicyGradient(correction=NO_CORRECTION))
    return row


def logprobs_of(folder: Path, row: Sample) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.from_numpy(row.ids.astype(np.int64))[None]
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids).logits[0], -1)
    return table[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("which", ["model", "tied_model"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_transformers_computes_the_engines_logprobs_from_an_export(
    open_engine: Open,
    make_row: Make,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    which: str,
    lora: LoraConfig | None,
) -> None:
    source: Path = request.getfixturevalue(which)
    engine = open_engine(source, lora=lora)
    untrained = engine.logprobs([make_row(16, [(4, 16, 1.0, 0.1)])])[0][1:]
    row = trained(engine, make_row)
    folder = engine.export(tmp_path / "model")
    ours = engine.logprobs([row])[0][1:]
    np.testing.assert_allclose(logprobs_of(folder, row), ours, atol=2e-5)
    assert np.abs(ours - untrained).max() > 1e-2
    assert AutoTokenizer.from_pretrained(folder).encode("a b") == AutoTokenizer.from_pretrained(source).encode("a b")
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == (which == "model")


@pytest.mark.parametrize("which", ["model", "tied_model"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_weights_have_the_names_shapes_and_dtype_of_the_source(
    open_engine: Open, tmp_path: Path, request: pytest.FixtureRequest, which: str, lora: LoraConfig | None
) -> None:
    source: Path = request.getfixturevalue(which)
    file = open_engine(source, lora=lora).weights(tmp_path / "new" / "w.safetensors")
    ours, theirs = load_file(file), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0)
    assert [path.name for path in file.parent.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_of_gathered_weights_there_is_never_more_than_a_layer(tmp_path: Path, lora: LoraConfig | None) -> None:
    """As many ranks gather them: each tensor is made by a collective, then rounded and written."""
    made = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(made)
    model.save_pretrained(tmp_path / "source")
    if lora is not None:
        add_adapters(model, lora)
    layer = sum(value.nbytes for name, value in model.state_dict().items() if ".layers.0." in name)
    whole = sum(value.nbytes for name, value in model.state_dict().items() if ".layers." in name)
    for write in (write_file, write_folder):
        with Bytes() as counted:
            gathered = whole_weights(model, torch.bfloat16, torch.clone)
            write(tmp_path / "source", gathered, torch.bfloat16, tmp_path / write.__name__)
        assert whole == 12 * layer
        assert counted.most < 2 * layer
        assert counted.now < layer
    ours, theirs = load_file(tmp_path / "write_file"), load_file(tmp_path / "source" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert load_file(tmp_path / "write_folder" / "model.safetensors").keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value.float(), theirs[name], rtol=0.01, atol=1e-4)


def test_tensors_that_come_in_any_order_are_one_file(tmp_path: Path) -> None:
    """Of all kinds and odd sizes; other libraries read it, and its digest is that of the file that they would write."""
    tensors = {
        "b.odd": torch.arange(5).bfloat16(), "a": torch.arange(12.0).view(3, 4), "scalar": torch.tensor(3.0),
        "bytes": torch.arange(7, dtype=torch.uint8), "empty": torch.zeros(0, 4), "flags": torch.tensor([True, False, True]),
        "eight": torch.arange(9.0).to(torch.float8_e4m3fn), "wide": torch.arange(3, dtype=torch.int64), "é\"": torch.ones(2),
    }  # fmt: skip
    file, other = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    sizes = write_tensors(file, tensors.items(), tensors, lambda written: {"written": str(len(written))})
    save_file(tensors, other)
    assert sizes == {name: value.nbytes for name, value in tensors.items()}
    found = load_file(file)
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype is value.dtype and found[name].shape == value.shape for name, value in tensors.items())
    assert all(torch.equal(found[name].float(), value.float()) for name, value in tensors.items())
    with safe_open(file, "pt") as handle:
        assert handle.metadata() == {"written": "9"}
    assert hash_weights(file) == hash_weights(other)
    with pytest.raises(EngineError, match="were reserved: please report this"):
        write_tensors(file, tensors.items(), [], lambda _: {"more": "x" * 2000})


def test_chat_templates_that_have_a_name_are_carried_over(open_engine: Open, tmp_path: Path, model: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    folder = open_engine(source).export(tmp_path / "model")
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert (folder / "additional_chat_templates").stat().st_mode & 0o100, "a folder that cannot be entered is no use"
    assert "tool_use" in AutoTokenizer.from_pretrained(folder).chat_template


def test_a_bfloat16_engine_exports_bfloat16(open_engine: Open, make_row: Make, tmp_path: Path) -> None:
    engine = open_engine(dtype="bfloat16")
    trained(engine, make_row)
    folder = engine.export(tmp_path / "model")
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_lora_trains_adapters_only_and_merges_without_touching_the_base(
    open_engine: Open, make_row: Make, tmp_path: Path, model: Path
) -> None:
    engine = open_engine(lora=LoraConfig(rank=4, alpha=8))
    base = {name: value.clone() for name, value in engine._opened().model.state_dict().items() if ".lora_" not in name}
    assert all(".lora_" in name for name in engine._parameters)
    trained(engine, make_row)
    merged = load_file(engine.weights(tmp_path / "w.safetensors"))
    source = load_file(model / "model.safetensors")
    changed = {name for name in merged if not torch.equal(merged[name], source[name])}
    assert changed == {name for name in merged if name.endswith("_proj.weight")}
    after = engine._opened().model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in base.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", ["model", "tied_model"])
def test_adapters_alone_are_merged_to_the_very_weights(
    open_engine: Open, make_row: Make, tmp_path: Path, request: pytest.FixtureRequest, which: str, dtype: str
) -> None:
    source: Path = request.getfixturevalue(which)
    engine = open_engine(source, lora=LoraConfig(rank=4, alpha=8), dtype=dtype)
    trained(engine, make_row)
    file = engine.adapters(tmp_path / "a.safetensors")
    assert file is not None
    check_weights(file, source)
    merged, whole = dict(weight_tensors([str(file)])), load_file(engine.weights(tmp_path / "w.safetensors"))
    assert merged.keys() == whole.keys()
    for name, value in merged.items():
        torch.testing.assert_close(value.to(whole[name].dtype), whole[name], rtol=0, atol=0)
    assert all(torch.equal(merged[name], value) for name, value in whole.items() if name.endswith("_proj.weight"))
    assert file.stat().st_size < (tmp_path / "w.safetensors").stat().st_size


def test_where_no_adapters_are_trained_or_their_matrices_are_stored_otherwise_whole_weights_are_needed(
    open_engine: Open, tmp_path: Path, model: Path
) -> None:
    assert open_engine().adapters(tmp_path / "a.safetensors") is None
    engine = open_engine(lora=LoraConfig(rank=4))
    tensors = load_file(model / "model.safetensors")
    tensors["renamed.weight"] = tensors.pop("model.layers.0.mlp.down_proj.weight")
    (tmp_path / "other").mkdir()
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    lm = engine._opened()
    assert write_adapters(tmp_path / "other", lm.model, lm.dtype, tmp_path / "a.safetensors") is None


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # peft says that it knows
def test_a_square_matrix_that_is_kept_transposed_needs_whole_weights(open_engine: Open, tmp_path: Path) -> None:
    """Its shape does not tell."""
    made = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(made).save_pretrained(tmp_path / "gpt2")
    engine = open_engine(tmp_path / "gpt2", lora=LoraConfig(rank=2, target_modules=("attn.c_proj",)))
    assert engine.adapters(tmp_path / "a.safetensors") is None


def test_adapters_of_another_model_are_refused(open_engine: Open, tmp_path: Path, model: Path) -> None:
    file = open_engine(lora=LoraConfig(rank=4)).adapters(tmp_path / "a.safetensors")
    assert file is not None
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    with safe_open(file, "pt") as handle:
        metadata = handle.metadata()
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(PolicyServerError, match=r"has an adapter for '.*' that the model does not fit"):
        check_weights(file, model)


def test_lora_under_bfloat16_has_float32_adapters(open_engine: Open, make_row: Make, tmp_path: Path) -> None:
    engine = open_engine(lora=LoraConfig(rank=4), dtype="bfloat16")
    assert {value.dtype for value in engine._parameters.values()} == {torch.float32}
    row = trained(engine, make_row)
    np.testing.assert_allclose(
        logprobs_of(engine.export(tmp_path / "model"), row), engine.logprobs([row])[0][1:], atol=0.3
    )


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("no_such_layer",), r"'no_such_layer', and no module has that name: name modules such as 'down_proj'"),
        (("q_proj", "v_porj"), r"'v_porj', and no module has that name: did you mean 'v_proj'\?"),
        (("q_proj", ".*v_proj"), r"'\.\*v_proj', and no module has that name: did you mean 'v_proj'\?"),
        (("proj",), r"'proj', and no module has that name"),
        (("layers.7.self_attn.q_proj",), r"'layers\.7\.self_attn\.q_proj', and no module has that name"),
    ],
)
def test_a_name_that_fits_no_module_is_refused(model: Path, targets: tuple[str, ...], said: str) -> None:
    """Before anything is started, and when the model is loaded."""
    engine = TorchEngine(lora=LoraConfig(target_modules=targets), device="cpu")
    for refused in (lambda: engine.check(model), lambda: engine.open(model, OptimizerConfig(), seed=0)):
        with pytest.raises(EngineError, match=rf"engine\.lora does not fit this model: target_modules has {said}"):
            refused()


@pytest.mark.parametrize(
    "targets", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head", "layers.1.mlp.up_proj")]
)
@pytest.mark.parametrize("step", ["linear", "tree"])
def test_adapters_of_tables_and_output_layers_make_a_step_and_reach_the_export(
    open_engine: Open, make_row: Make, tmp_path: Path, targets: tuple[str, ...], step: str
) -> None:
    engine = open_engine(lora=LoraConfig(rank=4, target_modules=targets), step=step, lr=1e-2)
    rows = [make_row(16, [(4, 16, 1.0, 0.1)], seed=seed) for seed in (0, 1)]
    rows[1].ids[:8] = rows[0].ids[:8]
    before = engine.logprobs(rows)[0][1:]
    for _ in range(3):
        assert engine.step(rows, ClippedPolicyGradient(correction=NO_CORRECTION)).metrics["stepped"] == 1.0
    ours = engine.logprobs(rows)[0][1:]
    assert np.abs(ours - before).max() > 1e-2
    np.testing.assert_allclose(logprobs_of(engine.export(tmp_path / "model"), rows[0]), ours, atol=2e-5)
    # vLLM merges matrices alone; a table is handed over whole.
    assert (engine.adapters(tmp_path / "a.safetensors") is None) == ("embed_tokens" in targets)


@pytest.mark.parametrize(
    ("target", "shared"), [("embed_tokens", "lm_head"), ("lm_head", r"model\.embed_tokens")], ids=["table", "head"]
)
def test_an_adapter_on_a_weight_that_two_layers_share_is_refused(
    open_engine: Open, tied_model: Path, target: str, shared: str
) -> None:
    lora = LoraConfig(target_modules=("q_proj", target))
    for refused in (lambda: TorchEngine(lora=lora).check(tied_model), lambda: open_engine(tied_model, lora=lora)):
        with pytest.raises(EngineError, match=rf"{target} has the same weight as {shared} \(tied\).*target_modules"):
            refused()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_what_is_written_may_be_read_by_whom_the_umask_lets(
    open_engine: Open, tmp_path: Path, umask: int, mode: int
) -> None:
    """A policy server that runs as another user reads these files."""
    engine = open_engine()
    before = os.umask(umask)
    try:
        engine.save(tmp_path / "state")
        engine.export(tmp_path / "model")
        for _ in range(2):  # the second replaces a file
            engine.weights(tmp_path / "weights" / "w.safetensors")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"weights.safetensors", "state.json", "model.safetensors", "config.json", "w.safetensors"} <= {
        path.name for path in files
    }
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: oct(mode) for path in files}
    assert not [path for path in files if path.name.startswith(".")]


def test_a_disk_that_is_full_leaves_the_old_file(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    file = engine.weights(tmp_path / "w.safetensors")
    before = file.read_bytes()

    def full(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_tensors", full)
    for write in (lambda: engine.weights(file), lambda: engine.export(tmp_path / "model")):
        with pytest.raises(EngineError, match="No space left on device"):
            write()
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
