"""A token's logprob depends on the tokens before it alone: what breaks that is silenced, replaced or refused when a model is
loaded, and `transformers` by itself says what is right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.config import Config, with_settings
from lightning.engines import sameness
from lightning.engines.plugin import torch_engine
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import EngineError
from torch import nn
from torch.nn.functional import dropout
from transformers import AutoModelForCausalLM
from transformers.models.doge.modeling_doge import DogeCDMoE
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3MLP, Qwen3Model, Qwen3RotaryEmbedding

from tests.bench.family_table import CASES, CONTEXT, ORIGINAL, Case, configuration, try_family, verdict

Open = Callable[..., TorchEngine]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bloom", "right"),  # dropout of the residual stream, by the configuration
        ("doge", "right"),  # dropout of the residual stream, by a layer
        ("gemma2", "right"),  # a cap of the scores, which sdpa leaves out
        ("llama dynamic", "scales the positions behind 16 tokens (dynamic), by each row's own length"),
        ("llama longrope", "right"),
        ("mixtral", "right"),  # jitter of the router
        ("nemotron_h", "first in model.layers.0.mixer"),  # its chunks
        ("opt", "right"),  # layers are skipped
        ("phi3 longrope", "right"),
        ("phimoe", "right"),  # the router reads its jitter in evaluation, too
        ("phimoe longrope", "first in model.rotary_emb (PhimoeRotaryEmbedding)"),
        ("recurrent_gemma", "right"),  # a cap of the logits
        ("seed_oss", "right"),  # dropout of the residual stream, by a layer
    ],
)
def test_a_family_is_right_or_refused_by_name(name: str, said: str, tmp_path: Path) -> None:
    found = try_family(CASES[name], tmp_path)
    assert said == verdict(found) or said in str(found.get("refused")), found


def test_doges_experts_depend_on_their_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They halve a micro-batch where they mean to halve the router's numbers; transformers 5.10 cannot compute them at all."""
    more: dict[str, object] = {"is_moe": True, "num_experts": 16, "keep_window_size": 2048}
    AutoModelForCausalLM.from_config(configuration(Case("doge", more))).save_pretrained(tmp_path)
    engine = TorchEngine(device="cpu")
    with pytest.raises(EngineError, match=r"cannot compute DogeForCausalLM .*argument 'input'.*another family"):
        engine.open(tmp_path, OptimizerConfig(), seed=0)
    experts = DogeCDMoE.forward
    monkeypatch.setattr(DogeCDMoE, "forward", lambda self, states: experts(self, states)[0])
    with pytest.raises(EngineError, match=r"beside a longer row than alone .* first in model\.layers\.0\.mlp"):
        engine.open(tmp_path, OptimizerConfig(), seed=0)


def noisy_layer(self: nn.Module, *given: object, **more: object) -> torch.Tensor:
    states: torch.Tensor = LAYER(self, *given, **more)
    return dropout(states, 0.2, self.training)


def skipping_layer(self: nn.Module, states: torch.Tensor, *given: object, **more: object) -> torch.Tensor:
    if self.training and random.random() < 0.2:
        return states
    result: torch.Tensor = LAYER(self, states, *given, **more)
    return result


LAYER, MLP, TRUNK = Qwen3DecoderLayer.forward, Qwen3MLP.forward, Qwen3Model.forward


@pytest.mark.parametrize("layer", [noisy_layer, skipping_layer])
def test_noise_that_nothing_silences_is_refused_by_the_layers_name(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, layer: Callable[..., torch.Tensor]
) -> None:
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", layer)
    open_engine()
    with pytest.raises(EngineError, match=r"first in model\.layers\.\d.*: set engine\.gradient_checkpointing = false"):
        open_engine(gradient_checkpointing=True)


def test_noise_of_another_module_is_silent_whatever_its_name(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen3MLP, "forward", lambda self, states: dropout(MLP(self, states), 0.5, self.training))
    assert open_engine(gradient_checkpointing=True)._opened().model.is_gradient_checkpointing


def test_a_row_that_depends_on_its_neighbour_is_refused(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(self: nn.Module, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = MLP(self, states - states.mean(0, keepdim=True) * 0.5)
        return result

    monkeypatch.setattr(Qwen3MLP, "forward", mixed)
    with pytest.raises(EngineError, match=r"beside a longer row than alone .* first in model\.layers\.0\.mlp"):
        open_engine()


def test_a_row_that_depends_on_history_is_refused(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def remembering(self: nn.Module, states: torch.Tensor) -> torch.Tensor:
        seen.append(states.shape[0])
        result: torch.Tensor = MLP(self, states) * (2.0 if seen[-1] == 1 and 3 in seen else 1.0)
        return result

    monkeypatch.setattr(Qwen3MLP, "forward", remembering)
    with pytest.raises(EngineError, match="after other rows than before them"):
        open_engine()


def test_places_at_the_end_of_the_context_are_tried(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation by the longest row is seen without computing one."""
    original = Qwen3RotaryEmbedding.forward

    def stretched(self: nn.Module, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = original(
            self, states, positions // (2 if positions.max() > 3000 else 1)
        )
        return found

    monkeypatch.setattr(Qwen3RotaryEmbedding, "forward", stretched)
    with pytest.raises(EngineError, match=r"first in model\.rotary_emb"):
        open_engine()
    open_engine(max_model_len=3000)  # no row gets there


def test_the_check_leaves_random_states_as_they_were(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def seed(_seed: int) -> None:
        torch.set_rng_state(states[0])

    monkeypatch.setattr("lightning.engines.torch.engine.torch.manual_seed", seed)
    open_engine(gradient_checkpointing=True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_bfloat16_is_judged_by_its_own_rounding(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    open_engine(dtype="bfloat16", gradient_checkpointing=True)
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", noisy_layer)
    with pytest.raises(EngineError, match=r"first in model\.layers\.0"):
        open_engine(dtype="bfloat16", gradient_checkpointing=True)


@pytest.mark.parametrize(
    ("server", "served"),
    [
        ({}, None),
        ({"max_model_len": 128}, 128),
        ({"attach": "http://127.0.0.1:1"}, 0),
        ({"attach": "http://127.0.0.1:1", "max_model_len": 64}, 64),
        ({"args": ("--max-model-len=32",), "max_model_len": 64}, 32),
        ({"args": ("--max_model_len", "auto")}, 0),
    ],
)
def test_the_plugin_tells_the_engine_what_vllm_serves(server: dict[str, object], served: int | None) -> None:
    config = with_settings(Config(), {f"policy_server.{name}": value for name, value in server.items()})
    assert torch_engine(config)._served == served


def test_positions_follow_vllms_length(tmp_path: Path) -> None:
    """Short factors up to the length before scaling, long ones beyond, for every position; an attached vLLM must say."""
    case = CASES["phi3 longrope"]
    try_family(case, tmp_path)
    factors = configuration(case).rope_parameters
    (tmp_path / "tokenizer.json").write_text("{}")

    def frequencies(served: int | None) -> torch.Tensor:
        engine = TorchEngine(device="cpu", max_model_len=served)
        engine.open(tmp_path, OptimizerConfig(), seed=0)
        found: torch.Tensor = engine._opened().model.model.rotary_emb.inv_freq
        engine.close()
        return found

    plain = 10000.0 ** -(torch.arange(0, 32, 2) / 32)
    for served, which in ((None, "short"), (ORIGINAL, "short"), (ORIGINAL + 1, "long"), (CONTEXT, "long")):
        torch.testing.assert_close(frequencies(served), plain / torch.tensor(factors[f"{which}_factor"]))
    for refused in (frequencies, lambda served: TorchEngine(max_model_len=served).check(tmp_path)):
        with pytest.raises(
            EngineError, match=r"longrope.* set policy_server\.max_model_len to that of the attached vLLM"
        ):
            refused(0)


def test_a_cap_that_is_too_weak_for_the_few_tokens_is_seen_all_the_same(tmp_path: Path, open_engine: Open) -> None:
    try_family(CASES["gemma2"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_logit_softcapping": 1e4}))
    assert open_engine(tmp_path)._opened().model.config._attn_implementation == "eager"
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_logit_softcapping": None}))
    assert open_engine(tmp_path)._opened().model.config._attn_implementation == "sdpa"


def test_the_check_is_a_few_short_rows(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(self: nn.Module, *given: object, **more: object) -> object:
        computed.append(more["input_ids"].numel())  # type: ignore[attr-defined]
        return TRUNK(self, *given, **more)

    monkeypatch.setattr(Qwen3Model, "forward", counted)
    open_engine(gradient_checkpointing=True)
    assert len(computed) <= 9
    assert sum(computed) < 100
    assert sameness.LONG == 12
