"""Several policies in one engine: each trains as by itself, on one base model in memory."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.batch.sample import Sample, TokenSpan
from lightning.config import Config, LoraConfig
from lightning.config.plugin_settings import EngineConfig
from lightning.engines.export import write_adapters
from lightning.engines.plugin import torch_engine
from lightning.engines.protocol import Engine, OptimizerConfig, StepResult
from lightning.engines.step import NonFiniteError
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import ConfigError, DataError, EngineError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import TokenBatch
from lightning.plugins import plugins
from lightning.policy_server.model_folder import ADAPTERS
from lightning.testing.tiny_models import make_tiny_model
from lightning_finetuning.dpo import PreferenceLoss
from lightning_policies.engine import PolicyEngine, TrainedPolicy, merged, seed_of
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny_families import make_tiny_family

VOCAB = 320
LOSS = ClippedPolicyGradient(entropy_coefficient=0.01, correction=NO_CORRECTION)
OPTIMIZER = OptimizerConfig(lr=1e-2, max_grad_norm=0.05)
POLICIES = {
    "writer": TrainedPolicy(LoraConfig(rank=4), lr=2e-2),
    "editor": TrainedPolicy(LoraConfig(rank=2, target_modules=("q_proj", "v_proj"))),
}
SECTION = {"device": "cpu", "dtype": "float32", "max_nonfinite_steps": 1}

Open = Callable[..., PolicyEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tied", vocab=VOCAB, tied=True)


def config(**section: object) -> Config:
    return Config(engine=EngineConfig(**{**SECTION, **section}))


@pytest.fixture
def open_policies(model: Path) -> Iterator[Open]:
    """`open_policies(policies, optimizer, seed=..., critic=..., **settings of the section engine)`; closed at the end."""
    opened: list[PolicyEngine] = []

    def make(
        policies: dict[str, TrainedPolicy] | None = None,
        optimizer: OptimizerConfig = OPTIMIZER,
        *,
        seed: int = 0,
        critic: bool = False,
        reference: Path | None = None,
        **section: object,
    ) -> PolicyEngine:
        settings = config(**section)
        engine = PolicyEngine(policies or POLICIES, torch_engine, settings)
        opened.append(engine)
        head = plugins().get("heads", "critic")(settings) if critic else None
        engine.open(model, optimizer, seed=seed, head=head, reference=reference)
        return engine

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def open_alone(model: Path) -> Iterator[Callable[..., TorchEngine]]:
    """`open_alone(name, **settings)`: one policy of `POLICIES` in a torch engine of its own."""
    opened: list[TorchEngine] = []

    def make(name: str, optimizer: OptimizerConfig = OPTIMIZER, **section: object) -> TorchEngine:
        engine = torch_engine(config(lora=POLICIES[name].lora, **section))
        opened.append(engine)
        engine.open(model, replace(optimizer, lr=POLICIES[name].lr or optimizer.lr), seed=seed_of(0, name))
        return engine

    yield make
    for engine in opened:
        engine.close()


def row(policy: str, seed: int, *, advantage: float = 1.0, weight: float = 0.1, target: float | None = None) -> Sample:
    generator, length = np.random.default_rng(seed), 10 + seed % 5
    sampled = np.arange(length) >= 4
    value = {} if target is None else {"value_target": target, "value_weight": 0.5}
    return Sample(
        generator.integers(0, VOCAB, length).astype(np.int32),
        np.where(sampled, np.float32(weight), np.float32(0)),
        np.where(sampled, np.float32(advantage), np.float32(0)),
        np.where(sampled, np.float32(-3), np.float32("nan")),
        np.where(sampled, 0, -1).astype(np.int32),
        (TokenSpan(f"{policy}-{seed}", 1, 0, 4, length, **value),),
        policy=policy,
    )


def rows(step: int) -> list[Sample]:
    """Three rows of each policy, mixed."""
    return [row(("writer", "editor")[i % 2], 10 * step + i, advantage=1.0 - i / 2) for i in range(6)]


def of(policy: str, samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.policy == policy]


def alone(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine._learning().items()}


def inner(engine: PolicyEngine, name: str) -> TorchEngine:
    found = engine._engines[name]
    assert isinstance(found, TorchEngine)
    return found


def weights_of(engine: PolicyEngine) -> dict[str, torch.Tensor]:
    return {f"{name}|{key}": value for name in engine._engines for key, value in alone(inner(engine, name)).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    "section",
    [{}, {"dtype": "bfloat16", "gradient_checkpointing": True}, {"step": "tree"}],
    ids=["rows", "bfloat16", "tree"],
)
def test_each_policy_is_bit_for_bit_the_one_that_an_engine_trains_by_itself(
    open_policies: Open, open_alone: Callable[..., TorchEngine], section: dict[str, object]
) -> None:
    optimizer = replace(OPTIMIZER, minibatches=2)
    together, before = open_policies(optimizer=optimizer, **section), None
    apart = {name: open_alone(name, optimizer, **section) for name in ("editor", "writer")}
    for step in range(3):
        samples = rows(step)
        found = together.step(samples, LOSS, 5e-3)
        for name, engine in apart.items():
            rate = 5e-3 * ((POLICIES[name].lr or 1e-2) / 1e-2)
            own = engine.step(of(name, samples), LOSS, rate)
            assert found.metrics[f"policy/{name}/loss"] == own.metrics["loss"]
            assert found.metrics[f"policy/{name}/lr"] == rate
            assert all(found.seen[span] == digest for span, digest in own.seen.items())
        now = {f"{name}|{key}": value for name, engine in apart.items() for key, value in alone(engine).items()}
        assert same(weights_of(together), now)
        assert before is None or not any(torch.equal(now[name], value) for name, value in before.items())
        before = now


def test_the_base_is_in_memory_once_and_stays_as_it_was(open_policies: Open, model: Path) -> None:
    engine = open_policies({**POLICIES, "reader": TrainedPolicy(LoraConfig(rank=2))})
    tensors = [
        {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in inner(engine, policy)._opened().model.state_dict().items()
            if ".lora_" not in name
        }
        for policy in ("editor", "reader", "writer")
    ]
    engine.step(rows(0), LOSS)
    stored = load_file(model / "model.safetensors")
    assert stored.keys() <= tensors[0].keys()
    for name, tensor in stored.items():
        assert tensors[0][name].data_ptr() == tensors[1][name].data_ptr() == tensors[2][name].data_ptr()
        assert torch.equal(tensors[0][name], tensor)


def live_bytes() -> int:
    """The bytes of all tensors of the process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def test_another_policy_needs_memory_for_its_adapters_alone(model: Path) -> None:
    needed: list[int] = []
    for names in ("a", "ab"):
        before = live_bytes()
        engine = PolicyEngine(dict.fromkeys(names, POLICIES["writer"]), torch_engine, config())
        engine.open(model, OPTIMIZER, seed=0)
        needed.append(live_bytes() - before)
        adapters = sum(value.nbytes for value in alone(inner(engine, "a")).values())
        engine.close()
    base = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    assert base + adapters <= needed[0] < 1.05 * (base + adapters)
    assert needed[1] - needed[0] == adapters
    assert adapters < base / 4


def test_close_frees_all_policies_and_the_base(open_policies: Open) -> None:
    engine = open_policies()
    kept = [weakref.ref(tensor) for name in POLICIES for tensor in inner(engine, name)._opened().model.parameters()]
    engine.close()
    engine.close()
    gc.collect()
    assert not [ref for ref in kept if ref() is not None]


def test_another_policy_changes_no_other_ones_first_adapters(open_policies: Open) -> None:
    two, three = open_policies(), open_policies({**POLICIES, "a": TrainedPolicy(LoraConfig(rank=3))})
    assert same(weights_of(two), {name: value for name, value in weights_of(three).items() if name[:2] != "a|"})
    assert not same(weights_of(two), weights_of(open_policies(seed=1)))


def test_rows_are_computed_by_their_policies_in_their_order(open_policies: Open) -> None:
    engine = open_policies(critic=True)
    engine.step([*rows(0), row("writer", 90, target=1.0)], LOSS)
    samples = [replace(row("writer", 3), policy=policy) for policy in ("writer", "editor", "writer")]
    first, other, again = engine.logprobs(samples)
    assert first.shape == again.shape == (len(samples[0]),)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other)[1:].max() > 1e-3
    np.testing.assert_array_equal(other, inner(engine, "editor").logprobs(samples[:1])[0])
    values = engine.values(samples)
    assert values[0] == values[2] != values[1]
    assert engine.logprobs([]) == []


@pytest.mark.parametrize("call", ["step", "forward_backward", "logprobs", "values"])
def test_a_row_of_a_policy_that_is_not_trained_is_refused_before_anything_is_changed(
    open_policies: Open, call: str
) -> None:
    engine = open_policies()
    before = weights_of(engine)
    samples = [row("editor", 1), row("reader", 2), row("writer", 3)]
    with pytest.raises(DataError, match=r"rollout reader-2 .*the policy 'reader'.*trains editor, writer alone"):
        getattr(engine, call)(samples, *([LOSS] if call in ("step", "forward_backward") else []))
    assert same(before, weights_of(engine))
    assert engine.step(rows(1), LOSS).metrics["stepped"] == 1


@pytest.mark.parametrize("call", ["step", "forward_backward"])
def test_a_loss_that_compares_rows_takes_those_of_one_policy(open_policies: Open, call: str) -> None:
    loss = PreferenceLoss((("writer-1", "writer-3"),))
    engine = open_policies()
    before = weights_of(engine)
    with pytest.raises(ConfigError, match=r"PreferenceLoss compares .*trainer.policy_turns = 'editor:1,writer:1'"):
        getattr(engine, call)([row("writer", 1), row("editor", 2), row("writer", 3)], loss)
    assert same(before, weights_of(engine))
    assert "dpo_loss" in getattr(engine, call)([row("writer", 1), row("writer", 3)], loss).metrics


def test_a_policy_without_rows_stays_as_it_was_and_has_no_metrics(open_policies: Open) -> None:
    engine = open_policies()
    engine.step(rows(0), LOSS)
    before = alone(inner(engine, "editor"))
    metrics = engine.step(of("writer", rows(1)), LOSS).metrics
    assert same(before, alone(inner(engine, "editor")))
    assert metrics["stepped"] == metrics["policy/writer/gradient_share"] == 1.0
    assert not [name for name in metrics if "editor" in name]
    assert metrics["loss"] == metrics["policy/writer/loss"]
    empty = engine.step([], LOSS).metrics
    assert empty["stepped"] == empty["tokens"] == 0
    assert not [name for name in empty if name.startswith("policy/")]


def test_a_step_is_reported_for_all_policies_and_for_each(open_policies: Open) -> None:
    samples = [*rows(0), row("writer", 7), row("writer", 8)]
    result = open_policies().step(samples, LOSS, 1e-3)
    found = result.metrics
    own = {
        key: {name: found[f"policy/{name}/{key}"] for name in POLICIES}
        for key in (
            "tokens",
            "loss",
            "entropy",
            "grad_norm",
            "gradient_share",
            "lr",
            "max_logprob_gap",
            "mean_logprob_gap",
        )
    }
    tokens = own["tokens"]
    assert tokens == {name: sum((sample.weights != 0).sum() for sample in of(name, samples)) for name in POLICIES}
    assert found["tokens"] == found["tokens_compared"] == sum(tokens.values())
    for key in ("loss", "entropy", "mean_logprob_gap"):
        mean = sum(own[key][name] * tokens[name] for name in POLICIES) / sum(tokens.values())
        assert found[key] == pytest.approx(mean, rel=1e-12)
        assert own[key]["writer"] != own[key]["editor"]
    assert found["max_logprob_gap"] == max(own["max_logprob_gap"].values())
    assert found["grad_norm"] ** 2 == pytest.approx(sum(norm**2 for norm in own["grad_norm"].values()))
    assert sum(own["gradient_share"].values()) == pytest.approx(1)
    for name in POLICIES:
        share = (own["grad_norm"][name] / found["grad_norm"]) ** 2
        assert own["gradient_share"][name] == pytest.approx(share)
        assert own["grad_norm"][name] > OPTIMIZER.max_grad_norm  # before clipping
    assert own["lr"] == {"writer": 1e-3 * (2e-2 / 1e-2), "editor": 1e-3}
    assert (found["lr"], found["updates"], found["stepped"], found["skipped_nonfinite"]) == (1e-3, 2, 1, 0)
    assert result.seen.keys() == {(span.rollout, 1, 0) for sample in samples for span in sample.spans}


def test_a_metric_that_no_policy_measured_is_absent() -> None:
    one = {"tokens": 3.0, "tokens_compared": 0.0, "loss": 1.0, "x_max": 2.0, "p999_logprob_gap": 0.5, "updates": 1.0}
    other = {"tokens": 1.0, "tokens_compared": 1.0, "loss": 5.0, "x_max": 4.0, "mean_logprob_gap": 7.0, "updates": 0.0}
    reports = {"a": StepResult(one, {}), "b": StepResult(other, {})}
    found = merged(reports, 1e-3, each=False).metrics
    assert found == {
        "tokens": 4, "tokens_compared": 1, "loss": 2, "p999_logprob_gap": 0.5, "x_max": 4, "updates": 1, "mean_logprob_gap": 7,
    }  # fmt: skip
    assert merged(
        {"a": StepResult({"loss": 1.0}, {}), "b": StepResult({"loss": 2.0}, {})}, 1.0, each=False
    ).metrics == {"loss": 1.5}


def test_an_update_that_is_not_finite_is_skipped_for_its_policy_alone(
    open_policies: Open, open_alone: Callable[..., TorchEngine]
) -> None:
    engine, by_itself = open_policies(), open_alone("writer")
    before, samples = (
        alone(inner(engine, "editor")),
        [*of("writer", rows(0)), row("editor", 9, advantage=3e38, weight=1.0)],
    )
    found = engine.step(samples, LOSS).metrics
    assert (found["stepped"], found["skipped_nonfinite"], found["updates"]) == (1, 1, 1)
    assert (found["policy/editor/skipped_nonfinite"], found["policy/writer/skipped_nonfinite"]) == (1, 0)
    assert found["policy/writer/gradient_share"] == 1
    assert not {"policy/editor/grad_norm", "policy/editor/lr", "policy/editor/gradient_share"} & found.keys()
    assert all(map(math.isfinite, found.values()))
    by_itself.step(of("writer", samples), LOSS)
    assert same(alone(inner(engine, "writer")), alone(by_itself))
    assert same(before, alone(inner(engine, "editor")))
    none = engine.step(
        [row("writer", 9, advantage=3e38, weight=1.0)], LOSS
    ).metrics  # it counts by itself, so this is its first
    assert (none["stepped"], none["skipped_nonfinite"]) == (0, 1)


def test_after_an_error_in_the_middle_of_a_step_nothing_but_loading_a_state_is_possible(
    open_policies: Open, tmp_path: Path
) -> None:
    engine = open_policies()
    engine.save(tmp_path / "state")
    samples = [*of("editor", rows(0)), row("writer", 9, advantage=3e38, weight=1.0)]
    assert engine.step(samples, LOSS).metrics["policy/writer/skipped_nonfinite"] == 1
    with pytest.raises(
        EngineError, match=r"the policy writer: .* 2nd in a row, more than engine\.max_nonfinite_steps = 1"
    ):
        engine.step(samples, LOSS)
    for use in (
        lambda: engine.step(rows(0), LOSS),
        lambda: engine.save(tmp_path / "half"),
        lambda: engine.adapters(tmp_path / "half"),
        lambda: engine.export(tmp_path / "half"),
        lambda: engine.logprobs(rows(0)),
        lambda: engine.optim_step(),
    ):
        with pytest.raises(EngineError, match=r"a step was taken for editor and then failed .*: resume the run"):
            use()
    assert not (tmp_path / "half").exists()
    engine.load(tmp_path / "state")
    fresh = open_policies()
    assert engine.step(rows(0), LOSS) == fresh.step(rows(0), LOSS)
    assert same(weights_of(engine), weights_of(fresh))


def test_a_step_that_fails_before_any_update_can_be_taken_again(open_policies: Open) -> None:
    engine = open_policies()
    foreign = row("editor", 1)
    foreign.ids[2] = VOCAB
    with pytest.raises(DataError, match=str(VOCAB)):
        engine.step([foreign, *of("writer", rows(0))], LOSS)
    assert engine.step(rows(0), LOSS) == open_policies().step(rows(0), LOSS)


@pytest.mark.parametrize("critic", [False, True])
def test_a_resumed_run_goes_on_bit_for_bit(open_policies: Open, tmp_path: Path, critic: bool) -> None:
    def train(engine: PolicyEngine, steps: range) -> list[StepResult]:
        return [
            engine.step([*rows(step), *(row("writer", 90 + step, target=1.0) for _ in range(critic))], LOSS)
            for step in steps
        ]

    first = open_policies(critic=critic)
    train(first, range(2))
    first.save(tmp_path / "state")
    went_on = train(first, range(2, 4))
    second = open_policies(seed=99, critic=critic)
    second.load(tmp_path / "state")
    assert train(second, range(2, 4)) == went_on
    assert same(weights_of(first), weights_of(second))
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["editor", "writer"]


def test_a_state_of_other_policies_is_refused_before_anything_is_changed(open_policies: Open, tmp_path: Path) -> None:
    engine, other = open_policies(), open_policies({"writer": POLICIES["writer"], "a": POLICIES["editor"]})
    other.step([row("writer", 1)], LOSS)
    other.save(tmp_path / "state")
    inner(engine, "editor").save(tmp_path / "one")
    before = weights_of(engine)
    with pytest.raises(EngineError, match="has no policy editor and also has the policy a: resume"):
        engine.load(tmp_path / "state")
    for folder in ("one", "missing"):
        with pytest.raises(EngineError, match=f"{folder} has no policy editor, writer: resume"):
            engine.load(tmp_path / folder)
    assert same(before, weights_of(engine))
    assert engine.step(rows(0), LOSS).metrics["stepped"] == 1


def test_a_state_that_was_loaded_in_part_is_not_trained_on(open_policies: Open, tmp_path: Path) -> None:
    engine = open_policies()
    engine.save(tmp_path / "state")
    (tmp_path / "state" / "writer" / "weights.safetensors").write_bytes(b"broken")
    with pytest.raises(EngineError, match=r"the policy writer: .*state/writer is not a whole training state"):
        engine.load(tmp_path / "state")
    with pytest.raises(EngineError, match="loaded in part, so the policies do not belong together"):
        engine.step(rows(0), LOSS)


def test_gradients_of_parts_are_added_up_and_then_updated(open_policies: Open) -> None:
    engine, whole = open_policies(), open_policies()
    samples = rows(0)
    engine.forward_backward(of("writer", samples), LOSS)
    found = engine.forward_backward(of("editor", samples), LOSS).metrics
    assert found["tokens"] == sum((sample.weights != 0).sum() for sample in samples)
    assert (found["stepped"], found["updates"]) == (0, 0)
    updated = engine.optim_step(1e-3).metrics
    assert (updated["lr"], updated["updates"], updated["policy/writer/lr"]) == (1e-3, 2, 2e-3)
    expected = whole.step(samples, LOSS, 1e-3)
    assert updated["grad_norm"] == expected.metrics["grad_norm"]
    assert same(weights_of(engine), weights_of(whole))
    with pytest.raises(EngineError, match="no gradient"):
        engine.optim_step()


def test_a_policy_whose_rows_have_no_weight_needs_no_gradient(open_policies: Open) -> None:
    engine = open_policies()
    engine.forward_backward([row("editor", 1, weight=0.0), *of("writer", rows(0))], LOSS)
    assert engine.optim_step().metrics["updates"] == 1


def test_a_loss_that_is_not_finite_discards_the_gradient_of_every_policy(open_policies: Open) -> None:
    engine = open_policies()
    before = weights_of(engine)
    with pytest.raises(NonFiniteError):
        engine.forward_backward([*of("editor", rows(0)), row("writer", 9, advantage=3e38, weight=1e3)], LOSS)
    with pytest.raises(EngineError, match="no gradient"):
        engine.optim_step()
    engine.forward_backward([row("writer", 1)], LOSS)
    assert engine.optim_step().metrics["updates"] == 1
    assert same(alone(inner(engine, "editor")), {key[7:]: value for key, value in before.items() if key[0] == "e"})


def test_an_update_of_one_gradient_that_is_not_finite(
    open_policies: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_policies()

    def broken(*_: object) -> dict[str, float]:
        raise NonFiniteError("the gradient is not finite")

    monkeypatch.setattr(inner(engine, "editor"), "update", broken)
    before = alone(inner(engine, "editor"))
    engine.forward_backward(rows(0), LOSS)
    found = engine.optim_step().metrics
    assert (found["updates"], found["skipped_nonfinite"], found["stepped"]) == (1, 1, 1)
    assert "the update of the policy editor is skipped: the gradient is not finite" in caplog.text
    assert same(before, alone(inner(engine, "editor")))
    engine.forward_backward(of("editor", rows(0)), LOSS)
    with pytest.raises(NonFiniteError):
        engine.optim_step()


def test_the_adapters_of_all_policies_are_one_file(open_policies: Open, tmp_path: Path, model: Path) -> None:
    engine = open_policies()
    engine.step(rows(0), LOSS)
    file = engine.adapters(tmp_path / "new" / "version.safetensors")
    tensors, told = load_file(file), safe_open(file, "pt").metadata()
    assert json.loads(told["policies"]).keys() == {"editor", "writer"}
    for name in POLICIES:
        lm = inner(engine, name)._opened()
        own = write_adapters(model, lm.model, lm.dtype, tmp_path / name)
        assert own is not None
        assert json.loads(told["policies"])[name] == json.loads(safe_open(own, "pt").metadata()[ADAPTERS])
        expected = {f"{name}|{key}": value for key, value in load_file(own).items()}
        assert same(expected, {key: value for key, value in tensors.items() if key.startswith(f"{name}|")})
    assert "editor|model.layers.0.self_attn.q_proj.weight|lora_A" in tensors
    assert [path.name for path in file.parent.iterdir()] == ["version.safetensors"]
    with pytest.raises(EngineError, match=r"the policies editor, writer: .*policy_server\.attach"):
        engine.weights(tmp_path / "w")


def test_an_export_has_a_model_and_adapters_for_each_policy(open_policies: Open, tmp_path: Path, model: Path) -> None:
    engine = open_policies()
    for step in range(2):
        engine.step(rows(step), LOSS)
    folder = engine.export(tmp_path / "model")
    assert sorted(path.name for path in folder.iterdir()) == ["adapters", "editor", "writer"]
    sample = row("writer", 4)
    ids = torch.from_numpy(sample.ids.astype(np.int64))[None]
    for name in POLICIES:
        ours = engine.logprobs([replace(sample, policy=name)])[0][1:]
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        whole = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        adapted = PeftModel.from_pretrained(base, folder / "adapters" / name)
        with torch.no_grad():
            for computed in (whole, adapted):
                table = torch.log_softmax(computed(input_ids=ids).logits[0], -1)
                found = table[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy()
                np.testing.assert_allclose(found, ours, atol=2e-5)
        told, lora = json.loads((folder / "adapters" / name / "adapter_config.json").read_text()), POLICIES[name].lora
        assert lora is not None
        assert told["base_model_name_or_path"] == str(model.resolve())
        assert (told["r"], told["lora_alpha"]) == (lora.rank, 32.0)
    assert np.abs(ours - engine.logprobs([replace(sample, policy="editor")])[0][1:]).max() < 1e-6
    assert np.abs(ours - engine.logprobs([replace(sample, policy="writer")])[0][1:]).max() > 1e-3


def test_the_teacher_is_loaded_once(open_policies: Open, model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "teacher", vocab=VOCAB, seed=7)
    taught, plain = open_policies(reference=other), open_policies()
    one, two = (inner(taught, name)._reference for name in ("editor", "writer"))
    assert one is two
    with inner(plain, "writer")._reference.model() as reference:  # type: ignore[union-attr]
        assert reference is inner(plain, "writer")._opened()


def test_what_cannot_be_trained_is_refused_by_name_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    class OneModel:
        """An engine that cannot share its base."""

    with pytest.raises(
        ConfigError, match=r"OneModel trains one.*\(editor, writer\).*several policies need engine = torch or verl"
    ):
        PolicyEngine(POLICIES, lambda _: OneModel(), config())  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="no policy may have the name 'adapters'"):
        PolicyEngine({"adapters": POLICIES["writer"]}, torch_engine, config())
    with pytest.raises(ConfigError, match="no policy is trained"):
        PolicyEngine({}, torch_engine, config())
    engine = PolicyEngine(POLICIES, torch_engine, config())
    assert isinstance(engine, Engine)
    assert engine.check(model) == ""
    wanting = ClippedPolicyGradient(surrogate=Wanting())
    with pytest.raises(ConfigError, match=r"the policy editor: the loss Wanting has needs_top_logprobs = 321.* to 320"):
        engine.check_loss(model, wanting)
    tables = {"writer": TrainedPolicy(LoraConfig(target_modules=("embed_tokens",)))}
    with pytest.raises(EngineError, match=r"the policy writer: policies\.writer\.lora does not fit this model"):
        PolicyEngine(tables, torch_engine, config()).check(model)
    folder, lora = make_tiny_family(tmp_path / "fp8", "fp8"), LoraConfig(rank=2, target_modules=("q_proj",))
    with pytest.raises(ConfigError, match=r"policy a: .*vLLM alone.* in FP8: .* policies\.a\.lora\.target_modules"):
        PolicyEngine({"a": TrainedPolicy(lora)}, torch_engine, config()).check(folder)


class Wanting:
    needs_top_logprobs = VOCAB + 1

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        return -tokens.logprobs


def test_numerics_in_which_policies_differ_are_named_by_policy(open_policies: Open) -> None:
    engine = open_policies()
    found = engine.numerics()
    assert (found["dtype"], found["tokens_per_microbatch"]) == ("float32", 8192)
    inner(engine, "writer")._budget = 4096
    assert engine.numerics()["tokens_per_microbatch"] == {"editor": 8192, "writer": 4096}
