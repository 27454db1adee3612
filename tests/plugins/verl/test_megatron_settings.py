"""What Megatron is told and what is refused by name: none of this needs Megatron, or verl."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.config import Config, with_settings
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.step import check_loss
from lightning.errors import ConfigError, EngineError, MissingExtraError
from lightning.installation import install_command
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import TokenBatch
from lightning_credits.value_head import CriticHead
from lightning_verl import megatron_settings
from lightning_verl.megatron_settings import (
    layout,
    megatron_engine,
    megatron_optimizer,
    refuse,
    refuse_model,
)
from lightning_verl.plugin import verl_engine
from lightning_verl.state import Taken, read_state, write_state

from tests.plugins.verl.conftest import VOCAB
from tests.plugins.verl.own_loss import Sharper


def configured(**settings: object) -> Config:
    named = {f"engine.{name.replace('__', '.')}": value for name, value in settings.items()}
    return with_settings(Config(), {"engine.verl.strategy": "megatron", "engine.verl.world_size": 8, **named})


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What is missing of Megatron's modules: nothing, until a test says so."""
    missing = set[str]()
    monkeypatch.setattr(megatron_settings, "_installed", lambda module: module not in missing)
    return missing


@pytest.mark.parametrize(
    ("megatron", "others", "message"),
    [
        ({}, {"lora__rank": 4}, r"engine\.lora has no adapters .* engine\.verl\.strategy = fsdp2"),
        ({"tensor_model_parallel_size": 3}, {}, r"world_size is 8, .*tensor_model_parallel_size = 3.* multiple of 3"),
        ({"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4}, {}, r"must be a multiple of 16"),
        ({"expert_model_parallel_size": 3}, {}, r"expert_model_parallel_size = 3: it must be a multiple of 3"),
        ({"tensor_model_parallel_size": "2"}, {}, r"tensor_model_parallel_size is '2', not a number of ranks"),
        ({"context_parallel_size": 2}, {}, r"context_parallel_size needs Transformer Engine's attention"),
        ({"vanilla_mbridge": False}, {}, r"Megatron-Bridge, whose models compute on GPUs"),
    ],
)
def test_what_cannot_be_done_is_refused(megatron: dict[str, object], others: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse(configured(verl__megatron=megatron, **others), "cpu")


def test_what_is_missing_is_named(installed: set[str]) -> None:
    refuse(configured(verl__megatron={"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}), "cpu")
    installed |= {"megatron.core"}
    with pytest.raises(
        MissingExtraError, match=rf"'megatron\.core' is not installed.*{re.escape(install_command('verl-megatron'))}"
    ):
        refuse(configured(), "cpu")
    installed ^= {"megatron.core", "transformer_engine"}
    with pytest.raises(ConfigError, match=r"Transformer Engine on GPUs, which is not installed: pip install"):
        refuse(configured(), "cuda")
    refuse(configured(), "cpu")
    installed ^= {"transformer_engine", "megatron.bridge"}
    refuse(configured(), "cuda")
    with pytest.raises(MissingExtraError, match=r"'megatron\.bridge'"):
        refuse(configured(verl__megatron={"vanilla_mbridge": False, "context_parallel_size": 2}), "cuda")


def test_a_critic_and_a_loss_of_most_probable_tokens_are_refused_before_anything_starts(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"the head 'critic' .* set engine\.verl\.strategy = fsdp2"):
        verl_engine(configured()).open(model, OptimizerConfig(), seed=0, head=CriticHead())
    with pytest.raises(ConfigError, match=r"the loss Sharper has .* Megatron cuts the vocabulary, .* = fsdp2"):
        check_loss(verl_engine(configured()), model, Sharper())
    more, fsdp2 = ClippedPolicyGradient(surrogate=wanting(VOCAB + 1)), with_settings(Config(), {"engine.device": "cpu"})
    with pytest.raises(
        ConfigError, match=r"the loss wanted has needs_top_logprobs = 321, .* set it to 320 at the most"
    ):
        check_loss(verl_engine(fsdp2), model, more)
    check_loss(verl_engine(fsdp2), model, Sharper())


def wanting(top: int) -> Callable[[TokenBatch], torch.Tensor]:
    def wanted(tokens: TokenBatch) -> torch.Tensor:
        return -tokens.logprobs

    wanted.needs_top_logprobs = top  # type: ignore[attr-defined]
    return wanted


def test_ours_goes_with_theirs() -> None:
    made = megatron_engine(
        configured(
            tokens_per_microbatch=777,
            gradient_checkpointing=True,
            verl__megatron={"override_transformer_config": {"moe_router_dtype": "fp32"}},
        ),
        seed=7,
    )
    assert (made["max_token_len_per_gpu"], made["seed"]) == (777, 7)
    assert made["override_transformer_config"] == {
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "moe_router_bias_update_rate": 0.0, "moe_router_dtype": "fp32",
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    }  # fmt: skip
    adam = megatron_optimizer(OptimizerConfig(betas=(0.8, 0.95), eps=1e-6))["override_optimizer_config"]
    assert adam == {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6}
    for table, option in (
        ("override_transformer_config", "hidden_dropout"),
        ("override_ddp_config", "overlap_param_gather"),
    ):
        with pytest.raises(ConfigError, match=rf"{table}\.{option} is decided by the engine"):
            megatron_engine(configured(verl__megatron={table: {option: True}}), seed=0)
    with pytest.raises(ConfigError, match=r"override_ddp_config must be a table of options of Megatron's Distributed"):
        megatron_engine(configured(verl__megatron={"override_ddp_config": 1}), seed=0)


@pytest.mark.parametrize(
    "named",
    [
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"full": {"rope_type": "yarn"}, "sliding": {"rope_type": "default"}}},
    ],
)
def test_a_model_that_mbridge_computes_otherwise_is_refused(named: dict[str, object]) -> None:
    scaled = SimpleNamespace(**named)
    with pytest.raises(ConfigError, match=r"scales its positions \((llama3|yarn)\), which mbridge leaves out"):
        refuse_model(configured(), scaled)
    refuse_model(configured(verl__megatron={"vanilla_mbridge": False}), scaled)
    for plain in ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {"rope_scaling": None}):
        refuse_model(configured(), SimpleNamespace(**plain))


def test_a_state_is_read_by_workers_that_are_cut_as_its_own(tmp_path: Path) -> None:
    by_two = layout(configured(verl__megatron={"tensor_model_parallel_size": 2}))
    write_state(tmp_path, Taken(3, 2, 0), OptimizerConfig(), None, by_two)
    assert read_state(tmp_path, None, by_two) == Taken(3, 2, 0)
    other = layout(configured(verl__world_size=4, verl__megatron={"tensor_model_parallel_size": 4}))
    with pytest.raises(
        EngineError, match=r"verl\.world_size = 8, engine\.verl\.megatron\.tensor_model_parallel_size = 2"
    ):
        read_state(tmp_path, None, other)
    by_fsdp = layout(configured(verl__strategy="fsdp2"))
    with pytest.raises(EngineError, match=r"set engine\.verl\.strategy = megatron, or start anew"):
        read_state(tmp_path, None, by_fsdp)
    write_state(tmp_path, Taken(3, 2, 0), OptimizerConfig(), None, by_fsdp)
    with pytest.raises(EngineError, match=r"set engine\.verl\.strategy = fsdp2"):
        read_state(tmp_path, None, by_two)
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(state | {"format": 3}))
    with pytest.raises(EngineError, match="has format 3, but this version of lightning works with format 2 only"):
        read_state(tmp_path, None, by_two)
