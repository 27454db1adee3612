"""Our settings in verl's words: everything of verl's can be given, and nothing is misunderstood silently."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from lightning.config import Config, with_settings
from lightning.engines.protocol import OptimizerConfig
from lightning.errors import ConfigError, EngineError
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer.runs import not_loadable
from lightning_verl.device import choose
from lightning_verl.plugin import verl_engine
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # verl's own


def made(model: Path, **settings: object) -> object:
    device = choose("cpu")
    from lightning_verl.settings import worker_config

    config = with_settings(Config(), {f"engine.{name}": value for name, value in settings.items()})
    return worker_config(config, model, OptimizerConfig(lr=3e-5, eps=1e-6), seed=7, device=device)


def test_ours_and_theirs(model: Path) -> None:
    made_of = made(
        model,
        tokens_per_microbatch=777,
        **{"lora.rank": 4, "verl.sharding": {"param_offload": True}, "verl.model": {"use_liger": False}},
        **{"verl.optimizer": {"optimizer": "Adam"}},
    )
    sharding, optimizer, of_model = made_of.engine_config, made_of.optimizer_config, made_of.model_config  # type: ignore[attr-defined]
    assert (sharding.strategy, sharding.max_token_len_per_gpu, sharding.param_offload) == ("fsdp2", 777, True)
    assert (optimizer.lr, optimizer.optimizer, optimizer.override_optimizer_config) == (3e-5, "Adam", {"eps": 1e-6})
    assert (of_model.lora_rank, of_model.hf_config._attn_implementation) == (4, "sdpa")


def test_megatrons(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own checks of them, too; Megatron itself is not needed for that."""
    monkeypatch.setattr("lightning_verl.megatron_settings._installed", lambda _: True)
    megatron = {"verl.strategy": "megatron", "verl.world_size": 4}
    cut = {"tensor_model_parallel_size": 2, "optimizer_offload": True}
    made_of = made(model, **megatron, tokens_per_microbatch=777, **{"verl.megatron": cut})
    engine, optimizer = made_of.engine_config, made_of.optimizer_config  # type: ignore[attr-defined]
    assert (engine.strategy, engine.tensor_model_parallel_size, engine.optimizer_offload) == ("megatron", 2, True)
    assert (engine.dtype, engine.max_token_len_per_gpu, engine.vanilla_mbridge) == ("float32", 777, True)
    assert (optimizer.lr, optimizer.override_optimizer_config["adam_eps"]) == (3e-5, 1e-6)
    refused: list[tuple[dict[str, object], str]] = [
        (
            {"verl.megatron": {"tensor_parallel_size": 2}},
            r"megatron\.tensor_parallel_size: .*mean 'tensor_model_parallel_size'",
        ),
        ({"verl.megatron": {"use_dist_checkpointing": True}}, r"decided by the engine, which writes safetensors"),
        ({"verl.megatron": {"param_offload": True}}, r"decided by the engine, which keeps a gradient .* forgets it"),
        ({"verl.optimizer": {"optimizer": "muon"}}, r"engine\.verl\.optimizer\.optimizer is decided by the engine"),
        ({"verl.optimizer": {"grad_clip": 1.0}}, r"optimizer\.grad_clip is decided by engine\.max_grad_norm"),
        (
            {"verl.sharding": {"param_offload": True}},
            r"sharding is not for engine\.verl\.strategy = megatron: leave param_",
        ),
        (
            {"verl.strategy": "fsdp2", "verl.megatron": cut},
            r"megatron is not for .* set engine\.verl\.strategy = megatron",
        ),
    ]
    for settings, message in refused:
        with pytest.raises(ConfigError, match=message):
            made(model, **{**megatron, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verl.sharding": {"param_ofload": True}}, r"engine.verl.sharding.param_ofload: .*mean 'param_offload'"),
        ({"verl.optimizer": {"lr": 1.0}}, r"engine.verl.optimizer.lr is decided by engine.lr"),
        ({"verl.optimizer": {"grad_clip": 1.0}}, r"optimizer.grad_clip is decided by engine.max_grad_norm"),
        ({"verl.optimizer": {"override_optimizer_config": {}}}, r"is decided by engine.betas and engine.eps"),
        ({"verl.model": {"use_fused_kernels": True}}, r"decided by the engine, which computes logprobs and"),
        (
            {"verl.sharding": {"entropy_checkpointing": True}},
            r"decided by the engine, which computes entropies in chunks",
        ),
        ({"verl.model": {"path": "x"}}, r"decided by the model that is trained"),
        ({"verl.sharding": {"strategy": "fsdp"}}, r"decided by engine.verl.strategy"),
        ({"verl.sharding": {"reshard_after_forward": False}}, r"decided by the engine, which reads shards"),
        ({"verl.sharding": {"ulysses_sequence_parallel_size": 2}}, r"needs flash_attention_2, and .* with sdpa"),
        ({"lora.alpha": 1.5}, r"engine.lora.alpha is 1.5"),
        ({"verl.optimizer": {"warmup_style": "square"}}, r"verl refuses the options of engine.verl.optimizer"),
    ],
)
def test_what_verl_cannot_do_is_refused_by_name(model: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(model, **settings)


@pytest.mark.parametrize(
    ("workers", "size", "message"),
    [
        (
            8,
            3,
            r"is 3, and 8 workers that divide 2 attention heads and 1 heads of keys .* cannot share rows so: set it to 2$",
        ),
        (3, 2, r"is 2, and 3 workers .*: leave it out$"),
        (8, 0, "is 0, and 8 workers"),
    ],
)
def test_workers_that_cannot_share_rows_are_refused(model: Path, workers: int, size: int, message: str) -> None:
    flash = {"override_config": {"attn_implementation": "flash_attention_2"}}
    settings = {"verl.model": flash, "verl.world_size": workers}
    with pytest.raises(ConfigError, match=rf"ulysses_sequence_parallel_size {message}"):
        made(model, **settings, **{"verl.sharding": {"ulysses_sequence_parallel_size": size}})
    taken = made(model, **settings | {"verl.world_size": 8}, **{"verl.sharding": {"ulysses_sequence_parallel_size": 2}})
    assert taken.engine_config.ulysses_sequence_parallel_size == 2  # type: ignore[attr-defined]


def test_what_the_engine_cannot_do_is_said_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="call open"):
        verl_engine(Config()).weights(tmp_path / "w")
    with pytest.raises(EngineError, match="not a model folder"):
        verl_engine(with_settings(Config(), {"engine.device": "cpu"})).open(tmp_path, OptimizerConfig(), seed=0)
    with pytest.raises(ConfigError, match=r"engine\.device is 'cuda:1'"):
        verl_engine(with_settings(Config(), {"engine.device": "cuda:1"})).open(model, OptimizerConfig(), seed=0)


LOST = "model.layers.0.mlp.up_proj.weight"


def a_tensor_is_lost(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[LOST]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def the_download_ended_early(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def a_shard_is_lost(folder: Path) -> None:
    """The index names it."""
    names = list(load_file(folder / "model.safetensors"))
    a_tensor_is_lost(folder)
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    of = {name: "two.safetensors" if name == LOST else "one.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))


def a_shard_lacks_what_the_index_names(folder: Path) -> None:
    a_shard_is_lost(folder)
    save_file({}, folder / "two.safetensors", metadata={"format": "pt"})


def a_layer_more_is_wanted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (a_tensor_is_lost, rf"1 tensors are missing .*{LOST}"),
        (the_download_ended_early, "not fully covered"),
        (a_shard_is_lost, r"two\.safetensors"),
        (a_shard_lacks_what_the_index_names, rf"1 tensors are missing .*{LOST}"),
        (a_layer_more_is_wanted, r"11 tensors are missing .*model\.layers\.2\."),
    ],
)
def test_missing_weights_are_refused_before_workers_start(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    break_it: Callable[[Path], None],
    message: str,
) -> None:
    """As by the torch engine. verl would make them up, or fail in a worker."""
    choose("cpu")
    monkeypatch.setattr(import_module("lightning_verl.worker_group"), "Alone", lambda *_: pytest.fail("it started"))
    monkeypatch.setattr("lightning_verl.megatron_settings._installed", lambda _: True)
    folder = Path(shutil.copytree(model, tmp_path / "holes"))
    break_it(folder)
    settings = {"engine.device": "cpu", "engine.verl.world_size": 0, "engine.verl.strategy": strategy}
    with pytest.raises(EngineError, match=rf"holes.*{message}"):
        verl_engine(with_settings(Config(), settings)).open(folder, OptimizerConfig(), seed=0)


def test_an_output_layer_that_is_the_embedding_is_not_missed(tmp_path: Path) -> None:
    from lightning_verl.settings import refuse_holes

    folder = make_tiny_model(tmp_path / "tied", tied=True)
    assert not [name for name in load_file(folder / "model.safetensors") if "lm_head" in name]
    refuse_holes(made(folder))


async def test_a_training_state_does_not_fit_another_strategy() -> None:
    stored, now = (
        {
            "config": with_settings(
                Config(), {"engine.verl.strategy": strategy, "engine.verl.world_size": size}
            ).model_dump()
        }
        for strategy, size in (("fsdp2", 1), ("megatron", 2))
    )
    assert await not_loadable(stored, now, []) == ["engine.verl.strategy"]
