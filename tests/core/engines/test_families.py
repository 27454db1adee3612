"""Folders laid out as published checkpoints are: trained, written, read again by transformers, resumed; or refused in time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.batch.sample import Sample
from lightning.config import LoraConfig
from lightning.engines.export import as_stored, contents, in_blocks
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import ConfigError, EngineError, PolicyServerError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.policy_server.model_folder import INDEX, check_weights, folder_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_families import FAMILIES, Family, make_tiny_family

Open = Callable[..., TorchEngine]
Make = Callable[..., Sample]

CARRIED: dict[Family, set[str]] = {
    "deepseek_v3": {"model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight"},
    "fp8": set(),
    "gemma3": {"multi_modal_projector.mm_input_projection_weight", "vision_tower.post_layernorm.weight"},
    "gpt2": {"h.0.attn.bias", "h.1.attn.bias"},
    "gpt_oss": set(),
    "llama2": {"model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"},
    "qwen3_5": {"model.visual.merger.norm.weight", "mtp.fc.weight", "mtp.norm.weight"},
    "qwen3_next": {"mtp.fc.weight", "mtp.norm.weight"},
}
"""What must be carried over, or some of it where a vision tower has many tensors."""
ROWS: tuple[Family, ...] = ("gemma3", "gpt_oss", "qwen3_5", "qwen3_next")
"""Families whose layers are of several kinds: their shared prefixes are not computed once."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    made = tmp_path_factory.mktemp("families")

    def of(family: Family) -> Path:
        return made / family if (made / family).is_dir() else make_tiny_family(made / family, family)

    return of


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def read_again(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Logprobs by transformers alone; every tensor of its model must be in the folder."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=tokens).logits[0], -1)
    found: np.ndarray = table[:-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_written_read_again_and_resumed(
    folders: Callable[[Family], Path], open_engine: Open, make_row: Make, tmp_path: Path, family: Family
) -> None:
    source = folders(family)
    found = contents(source)
    engine = open_engine(source, step="tree", lr=1e-2)
    rows = [make_row(32, [(16, 32, 1.0 - 2 * at, 0.1)], seed=at, name=f"r{at}") for at in (0, 1)]
    rows[1].ids[:16] = rows[0].ids[:16]
    taken = engine.step(rows, ClippedPolicyGradient(correction=NO_CORRECTION)).metrics
    assert (taken["stepped"], taken["tree"], taken["tokens"]) == (1.0, float(family not in ROWS), 32.0)
    assert CARRIED[family] <= set(found.carried)
    assert bool(found.carried) == bool(CARRIED[family])

    check_weights(engine.weights(tmp_path / "w.safetensors"), source)
    assert set(load_file(tmp_path / "w.safetensors")) == set(found.trained)
    folder = engine.export(tmp_path / "model")
    before, after = tensors(source), tensors(folder)
    assert {name: spec.shape for name, spec in folder_tensors(folder).items()} == {
        name: spec.shape for name, spec in folder_tensors(source).items()
    }
    assert all(bits(after[name]) == bits(before[name]) for name in found.carried)
    assert all(after[name].dtype == before[name].dtype for name in after)
    assert any(not torch.equal(after[name], before[name]) for name in found.trained)
    assert {file.name for file in source.iterdir() if "safetensors" not in file.name} == {
        file.name for file in folder.iterdir() if "safetensors" not in file.name
    }
    assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()

    ours = engine.logprobs(rows[:1])[0][1:]
    if family != "fp8":  # whose weights were rounded: see the next test
        np.testing.assert_allclose(read_again(folder, rows[0].ids), ours, atol=2e-5)
    assert AutoTokenizer.from_pretrained(folder).encode("a b") == AutoTokenizer.from_pretrained(source).encode("a b")

    engine.save(tmp_path / "state")
    resumed = open_engine(source, step="tree", lr=1e-2, seed=1)
    resumed.load(tmp_path / "state")
    for either in (engine, resumed):
        either.step(rows, ClippedPolicyGradient(correction=NO_CORRECTION))
    np.testing.assert_array_equal(resumed.logprobs(rows)[0], engine.logprobs(rows)[0])
    assert np.abs(engine.logprobs(rows)[0][1:] - ours).max() > 1e-3


def test_fp8_weights_that_did_not_change_are_stored_as_they_were_and_others_within_half_a_step(
    folders: Callable[[Family], Path], open_engine: Open, make_row: Make, tmp_path: Path
) -> None:
    source = folders("fp8")
    engine = open_engine(source, lr=1e-2)
    before, untrained = tensors(source), load_file(engine.weights(tmp_path / "w.safetensors"))
    assert {name: bits(value) for name, value in untrained.items()} == {
        name: bits(before[name]) for name in contents(source).trained
    }
    row = make_row(16, [(4, 16, 1.0, 0.1)])
    np.testing.assert_allclose(read_again(source, row.ids), engine.logprobs([row])[0][1:], atol=2e-5)
    engine.step([row], ClippedPolicyGradient(correction=NO_CORRECTION))
    exact = dict(engine._opened().model.named_parameters())
    written = AutoModelForCausalLM.from_pretrained(engine.export(tmp_path / "model"), dtype=torch.float32)
    for name, value in written.named_parameters():
        if name.endswith(("_proj", "_proj.weight")):
            # e4m3 has three bits behind the point: 1/16 of a value at most; near 0 the step is 2 ** -9 of the block's scale.
            assert ((value - exact[name]).abs() <= exact[name].abs() / 16 + 1e-3).all(), name
            assert not torch.equal(value, exact[name])
        else:
            torch.testing.assert_close(value, exact[name], rtol=0, atol=0)


def test_a_block_whose_largest_value_grew_gets_a_new_scale() -> None:
    scale = torch.tensor([[1.0, 2.0]])
    tensor = torch.tensor([[448.0, 3.0, 896.0, 4.0], [1.0, 2.0, 4.0, 5000.0]])
    values, scales = in_blocks(tensor, scale)
    assert scales.tolist() == [[1.0, pytest.approx(5000 / 448)]]
    assert values.float()[:, :2].tolist() == tensor[:, :2].tolist()
    assert values.float()[1, 3] == 448.0


def test_lora_on_a_model_that_sees_leaves_its_vision_tower_alone(
    folders: Callable[[Family], Path], open_engine: Open, make_row: Make, tmp_path: Path
) -> None:
    source = folders("gemma3")
    engine = open_engine(source, lora=LoraConfig(rank=4, target_modules=("q_proj", "v_proj")), lr=1e-2)
    assert not [name for name in engine._parameters if "vision" in name]
    engine.step([make_row(16, [(4, 16, 1.0, 0.1)])], ClippedPolicyGradient(correction=NO_CORRECTION))
    before, after = tensors(source), tensors(engine.export(tmp_path / "model"))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {
        f"language_model.model.layers.{at}.self_attn.{part}_proj.weight" for at in (0, 1) for part in "qv"
    }


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # peft's, of its own settings
def test_adapters_on_experts_that_are_one_parameter_are_refused_and_others_are_merged(
    folders: Callable[[Family], Path], open_engine: Open, make_row: Make, tmp_path: Path
) -> None:
    """peft gives a router and fused experts wrappers of their own, which would be trained and never written."""
    for family in ("qwen3_next", "deepseek_v3"):
        with pytest.raises(EngineError, match=r"in one parameter, so an adapter.*engine\.lora\.target_modules = "):
            open_engine(folders(family), lora=LoraConfig(rank=4))
    with pytest.raises(EngineError, match=r"model\.layers\.0\.linear_attn\.conv1d is no plain matrix, so an adapter"):
        open_engine(folders("qwen3_next"), lora=LoraConfig(rank=768, target_modules=("conv1d",)))
    engine = open_engine(folders("qwen3_next"), lora=LoraConfig(rank=4, target_modules=("q_proj", "v_proj")), lr=1e-2)
    row = make_row(16, [(4, 16, 1.0, 0.1)])
    engine.step([row], ClippedPolicyGradient())
    folder = engine.export(tmp_path / "model")
    np.testing.assert_allclose(read_again(folder, row.ids), engine.logprobs([row])[0][1:], atol=2e-5)


def test_a_trained_tensor_that_the_folder_lacks_is_never_left_out_silently(model: Path) -> None:
    with pytest.raises(EngineError, match=r"'model\.new\.weight' was trained, but .* has no tensor of that name"):
        list(as_stored(model, [("model.new.weight", torch.ones(2, 2))], torch.float32))


def test_a_bfloat16_engine_keeps_what_a_mixed_folder_stores_in_float32(
    folders: Callable[[Family], Path], open_engine: Open, make_row: Make, tmp_path: Path
) -> None:
    """Over shards with an index, as large models are."""
    source = tmp_path / "mixed"
    shutil.copytree(folders("qwen3_next"), source)
    whole = {
        name: value if name.endswith("A_log") else value.bfloat16()
        for name, value in load_file(source / "model.safetensors").items()
    }
    names = sorted(whole)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: whole[name] for name in own}, source / shard, metadata={"format": "pt"})
    (source / "model.safetensors").unlink()
    places = {name: shard for shard, own in shards.items() for name in own}
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    engine = open_engine(source, dtype="bfloat16")
    engine.step([make_row(16, [(4, 16, 1.0, 0.1)])], ClippedPolicyGradient(correction=NO_CORRECTION))
    folder = engine.export(tmp_path / "model")
    after = tensors(folder)
    assert {name: value.dtype for name, value in after.items()} == {name: value.dtype for name, value in whole.items()}
    log = "model.layers.0.linear_attn.A_log"
    torch.testing.assert_close(after[log], engine._opened().model.state_dict()[log], rtol=0, atol=0)
    assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_tied_folder_that_stores_its_output_layer_gets_the_trained_one(
    tied_model: Path, open_engine: Open, make_row: Make, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tied_model, source)
    weights = load_file(source / "model.safetensors")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    save_file(weights | {head: weights[embedding].clone()}, source / "model.safetensors", metadata={"format": "pt"})
    assert contents(source).remark() == ""
    engine = open_engine(source)
    engine.step([make_row(16, [(4, 16, 1.0, 0.1)])], ClippedPolicyGradient(correction=NO_CORRECTION))
    check_weights(engine.weights(tmp_path / "w.safetensors"), source)
    after = tensors(engine.export(tmp_path / "model"))
    assert torch.equal(after[head], after[embedding])
    assert not torch.equal(after[head], weights[embedding])


@pytest.mark.parametrize(
    ("quantised", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantised \(gptq\)"),
        ({"quant_method": "awq", "bits": 4}, r"quantised \(awq\)"),
        ({"quant_method": "mxfp4"}, r"quantised \(mxfp4\)"),
        ({"quant_method": "compressed-tensors"}, r"quantised \(compressed-tensors\)"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, r"quantised \(fp8 without blocks\)"),
    ],
)
def test_weights_that_are_packed_are_refused(
    model: Path, tmp_path: Path, quantised: dict[str, object], named: str
) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    with pytest.raises(ConfigError, match=rf"{named}.*train the checkpoint in bfloat16"):
        contents(folder)


def test_fp8_without_scales_of_whole_blocks_is_refused(folders: Callable[[Family], Path], tmp_path: Path) -> None:
    folder = tmp_path / "ragged"
    shutil.copytree(folders("fp8"), folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[f"{name}_scale_inv"] = torch.ones(3, 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"'{name}'.*F8_E4M3 without scales of whole blocks"):
        contents(folder)


def test_weights_in_pickles_are_refused_with_their_cure(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(model, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(PolicyServerError, match=r"pytorch_model\.bin, as pickles: load it with transformers"):
        contents(folder)


def test_a_layout_that_cannot_be_written_back_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads more layouts than it writes; here it is made to give a name back wrongly."""
    monkeypatch.setattr(
        "lightning.engines.loading.original_names",
        lambda model, weights: {name.replace("q_proj", "query"): value for name, value in weights.items()},
    )
    with pytest.raises(ConfigError, match=r"cannot be written back into .*: 2 tensors .*self_attn\.query\.weight'"):
        contents(model)
