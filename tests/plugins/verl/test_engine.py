"""The verl engine beside the torch engine: the same rows, losses and numbers, in this process and on a local Ray."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from lightning.batch.sample import Sample, TokenSpan
from lightning.config import LoraConfig
from lightning.engines import export
from lightning.engines.protocol import Engine, OptimizerConfig, SendsWeights, WritesAdapters
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import EngineError
from lightning.losses.protocol import Loss, LossOutput, TokenBatch
from lightning.policy_server.model_folder import weight_tensors
from lightning_attach.links import Spec, join
from lightning_attach.sending import Sender, entries
from lightning_credits.value_head import CriticHead
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from tests.plugins.verl.conftest import ALONE, CALLS, LOSS, UNCLIPPED, VOCAB, OpenVerl, masked
from tests.plugins.verl.own_loss import Sharper

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # verl's and Ray's own


def rows(seed: int, count: int = 7, temperature: float = 1.0) -> list[Sample]:
    """Rows of two calls and different lengths; every third is wholly the environment's from its middle on."""
    dice = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(dice.integers(12, 40))
        spans = (
            TokenSpan(f"r{seed}-{number}", 1, 0, 3, 6),
            TokenSpan(f"r{seed}-{number}", 1, 1, 7, length - 1 - number % 3),
        )
        weights, advantages = np.zeros(length, np.float32), np.zeros(length, np.float32)
        logprobs, versions = np.full(length, np.nan, np.float32), np.full(length, -1, np.int32)
        for span in spans:
            own = slice(span.start, span.stop)
            weights[own], advantages[own], versions[own] = 0.02, dice.normal(), 0
            logprobs[own] = dice.uniform(-7, -4) if span.seq else np.nan
        ids = dice.integers(0, VOCAB, length).astype(np.int32)
        made.append(Sample(ids, weights, advantages, logprobs, versions, spans, temperature))
    return made


def valued(samples: Sequence[Sample]) -> list[Sample]:
    """The rows with what a critic should say before each of their calls, but for the first row's first."""
    dice = np.random.default_rng(len(samples))
    made = [
        replace(
            sample, spans=tuple(replace(span, value_target=dice.normal(), value_weight=0.1) for span in sample.spans)
        )
        for sample in samples
    ]
    first, *others = made[0].spans
    return [replace(made[0], spans=(replace(first, value_target=np.nan, value_weight=0.0), *others)), *made[1:]]


def gradient(folder: Path) -> dict[str, torch.Tensor]:
    """The first moments of a saved state by the parameters' names: after one step, a tenth of the gradient."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 — it is not a mapping
                if name.endswith("exp_avg"):
                    key = name.removesuffix(".exp_avg").removesuffix("|exp_avg").removeprefix("optimizer.state.")
                    key = key.removeprefix("base_model.model.")
                    found.setdefault(key, {})[len(found.get(key, {}))] = torch.atleast_1d(tensors.get_tensor(name))
    return {name: torch.cat(list(parts.values())) for name, parts in found.items()}


@pytest.fixture
def open_torch(model: Path) -> Iterator[Callable[..., TorchEngine]]:
    opened: list[TorchEngine] = []

    def make(**settings: Any) -> TorchEngine:
        head = CriticHead(settings.pop("critic_trunk", "frozen"))
        engine = TorchEngine(device="cpu", **settings)
        opened.append(engine)
        engine.open(model, UNCLIPPED, seed=0, head=head)
        return engine

    yield make
    for engine in opened:
        engine.close()


def assert_equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray], tolerance: float = 1e-5) -> None:
    """Arrays of the same lengths, with NaN at the same places."""
    assert [len(row) for row in one] == [len(row) for row in other]
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=tolerance)


@pytest.mark.parametrize(
    "settings",
    [{}, {"lora": LoraConfig(rank=4, alpha=8), "critic_trunk": "shared", "gradient_checkpointing": True}],
    ids=["whole", "adapters"],
)
def test_it_computes_what_the_torch_engine_computes(
    open_verl: OpenVerl, open_torch: Callable[..., TorchEngine], settings: dict[str, Any], tmp_path: Path
) -> None:
    """The critic too, on a frozen trunk or one that it trains."""
    engine = open_verl(ALONE, optimizer=UNCLIPPED, critic=True, tokens_per_microbatch=64, **settings)
    compare(engine, open_torch(**settings), tmp_path)


def test_noise_that_nothing_silences_is_refused_by_the_layers_name(
    open_verl: OpenVerl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch engine's check, on packed rows; what `gradient_mode` silences is no noise."""

    def noisy(self: torch.nn.Module, *given: Any, **more: Any) -> torch.Tensor:
        return torch.nn.functional.dropout(layer(self, *given, **more), 0.2, self.training)

    layer = Qwen3DecoderLayer.forward
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", noisy)
    with pytest.raises(EngineError, match=r"first in .*layers\.0 .*engine\.gradient_checkpointing = false"):
        open_verl(ALONE, gradient_checkpointing=True)
    open_verl(ALONE)


def test_two_workers_compute_it_also_when_one_is_killed(
    open_verl: OpenVerl, open_torch: Callable[..., TorchEngine], tmp_path: Path
) -> None:
    """On a local Ray; and their state is resumed by another number of workers."""
    torch_engine = open_torch()
    two = open_verl(2, optimizer=UNCLIPPED, critic=True, tokens_per_microbatch=64)
    compare(two, torch_engine, tmp_path)
    assert isinstance(two, SendsWeights)
    file = two.weights(tmp_path / "sent")
    received, written = sent(two.sender(), file), load_file(file)
    assert received.keys() == written.keys()
    assert all(torch.equal(value, written[name]) for name, value in received.items())
    two.save(tmp_path / "two")
    assert not [file for file in (tmp_path / "two").iterdir() if file.suffix not in (".safetensors", ".json")]
    os.kill(workers()[1].pid, signal.SIGKILL)
    one = open_verl(ALONE, optimizer=UNCLIPPED, seed=7, critic=True)
    one.step(valued(rows(9)), LOSS)
    one.load(tmp_path / "two")
    batch = valued(rows(5))
    expected = torch_engine.step(batch, LOSS).metrics
    for engine in (two, one):
        found = engine.step(batch, LOSS).metrics
        for name in ("loss", "value_loss", "critic_grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-6)
        assert_equal(engine.values(batch), torch_engine.values(batch))
    assert two.sender().group() == "", "the first worker is another one now, too, and in no group"
    workers()[0].kill()
    with pytest.raises(EngineError, match="the last checkpoint is older than step 6"):
        two.step(rows(6), LOSS)


def sent(sender: Sender, file: Path) -> dict[str, torch.Tensor]:
    """What somebody in the place of vLLM's worker gets from it."""
    meeting, found = sender.listen("gloo", "127.0.0.1", 2, 60.0), dict[str, torch.Tensor]()
    specs = [Spec(entry.name, getattr(torch, entry.dtype), entry.shape) for entry in entries([file])]
    thread = threading.Thread(target=lambda: found.update(join(meeting, 1).receive(specs)))
    thread.start()
    sender.join("word")
    assert sender.group() == "word"
    sender.send([file])
    thread.join()
    return found


def compare(verl: Engine, torch_engine: TorchEngine, folder: Path) -> None:
    """Logprobs, values, gradient, metrics and what was seen, over steps with different losses, of 7 rows each: the second
    teaches the critic nothing, the fourth nothing else, and the last one's critic learns of one row, which is one rank's.
    Every second row of the first three has sampling masks."""
    losses: list[Loss] = [Sharper(), CALLS, LOSS, LOSS, LOSS]
    for number, loss in enumerate(losses):
        batch = rows(number, temperature=0.7 if number == 2 else 1.0)
        if number < 3:
            batch = masked(batch)
        if number != 1:
            batch = valued(batch) if number != 4 else [*valued(batch)[:1], *batch[1:]]
        if number == 3:
            batch = [replace(row, weights=np.zeros_like(row.weights)) for row in batch]
        logprobs = verl.logprobs(batch)
        assert all(np.flatnonzero(np.isnan(row)).tolist() == [0] for row in logprobs)
        assert_equal(logprobs, torch_engine.logprobs(batch))
        states = [*batch, replace(batch[0], spans=())]
        assert_equal(verl.values(states), torch_engine.values(states))
        found, expected = verl.step(batch, loss), torch_engine.step(batch, loss)
        assert found.seen == expected.seen
        for name in {*expected.metrics} - {"microbatches", "tokens_forward", "tree"}:
            assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=2e-4, abs=1e-5), name
        if number == 0:
            verl.save(folder / "verl")
            torch_engine.save(folder / "torch")
            mine, theirs = gradient(folder / "verl"), gradient(folder / "torch")
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                assert float((mine[name] - value).abs().max()) <= 1e-5 * max(1.0, float(value.abs().max())), name
    one, other = load_file(verl.weights(folder / "one")), load_file(torch_engine.weights(folder / "other"))
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert float((one[name] - value).abs().max()) <= 1e-4, name


def workers() -> list[psutil.Process]:
    """The processes of ranks on the local Ray."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "PolicyWorker" in " ".join(process.cmdline())]


def test_what_it_exports_is_what_it_computes_with(open_verl: OpenVerl, tmp_path: Path) -> None:
    """Also with adapters, which are merged."""
    engine = open_verl(ALONE, optimizer=OptimizerConfig(lr=1e-2), lora=LoraConfig(rank=4, alpha=8))
    engine.step(rows(0), LOSS)
    batch = rows(1, 2)
    loaded = AutoModelForCausalLM.from_pretrained(engine.export(tmp_path / "model"), dtype=torch.float32).eval()
    for row, found in zip(batch, engine.logprobs(batch), strict=True):
        ids = torch.from_numpy(row.ids.astype(np.int64))
        with torch.no_grad():
            expected = loaded(ids[None]).logits[0, :-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(found[1:], expected.numpy(), atol=1e-4)
    alone_are_the_whole(engine, tmp_path)


def alone_are_the_whole(engine: Engine, folder: Path) -> None:
    """The adapters alone, merged as vLLM's workers merge them, are the whole weights, in a smaller file."""
    assert isinstance(engine, WritesAdapters)
    file, whole = engine.adapters(folder / "adapters"), engine.weights(folder / "whole")
    assert file is not None
    assert file.stat().st_size < whole.stat().st_size / 2
    merged, expected = dict(weight_tensors([file])), load_file(whole)
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name].to(value.dtype), value, rtol=0, atol=1e-7)


def test_where_the_disk_is_full_other_ranks_are_not_left_waiting(
    open_verl: OpenVerl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank goes on gathering with them."""
    engine = open_verl(ALONE)
    part = engine._job.group._worker._part  # type: ignore[attr-defined]
    gathered = list[str]()

    def stream(*_: object, **__: object) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            gathered.append(str(number))
            yield f"model.layers.{number}.input_layernorm.weight", torch.ones(4)

    def full(_: Path, tensors: Iterator[tuple[str, torch.Tensor]], *__: object) -> None:
        next(tensors)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(part, "whole_weights", stream)
    monkeypatch.setattr(export, "write_tensors", full)
    with pytest.raises(EngineError, match="No space left on device"):
        engine.weights(tmp_path / "w.safetensors")
    assert gathered == ["0", "1", "2"]
    assert isinstance(engine, WritesAdapters)
    assert engine.adapters(tmp_path / "a.safetensors") is None, "all weights are trained"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda batch: LossOutput(batch.weights.sum()), "without a gradient"),
        (lambda batch: {}["x"], r"the loss raised KeyError\('x'\)"),
    ],
)
def test_a_wrong_loss_changes_nothing(
    open_verl: OpenVerl, loss: Callable[[TokenBatch], LossOutput], message: str
) -> None:
    engine, batch = open_verl(ALONE), rows(0)
    before = engine.logprobs(batch)
    with pytest.raises(EngineError, match=rf"{message}.* at step 1 in .* rows .*rollout r0-\d"):
        engine.step(batch, loss)
    assert_equal(engine.logprobs(batch), before, 0.0)
    assert engine.step([replace(row, weights=row.weights * 0) for row in batch], LOSS).metrics["stepped"] == 0
    assert "RANK" not in os.environ


def test_a_loss_that_is_not_finite_is_skipped_a_few_times(
    open_verl: OpenVerl, caplog: pytest.LogCaptureFixture
) -> None:
    engine, batch = open_verl(ALONE, max_nonfinite_steps=1), rows(0)
    before = engine.logprobs(batch)

    def broken(batch: TokenBatch) -> LossOutput:
        return LossOutput(batch.logprobs.sum() * float("nan"))

    skipped = engine.step(batch, broken).metrics
    assert (skipped["skipped_nonfinite"], skipped["stepped"]) == (1.0, 0.0)
    assert re.search(r"the loss is nan at step 1 in .* rows .*rollout r0-\d.*: the step is skipped", caplog.text)
    assert_equal(engine.logprobs(batch), before, 0.0)
    with pytest.raises(EngineError, match=r"2nd in a row, more than engine\.max_nonfinite_steps = 1"):
        engine.step(batch, broken)
    assert_equal(engine.logprobs(batch), before, 0.0)
    assert engine.step(batch, LOSS).metrics["stepped"] == 1.0


def test_first_weights_are_kept_when_a_loss_wants_them_and_are_the_folders(open_verl: OpenVerl, tmp_path: Path) -> None:
    """Wanted before the first step, after some, and in a run that was resumed."""
    batch, seen = rows(0, 2), list[float]()

    def to_reference(batch: TokenBatch) -> LossOutput:
        assert batch.reference is not None
        seen.extend(batch.reference.tolist())
        return LossOutput((batch.weights * (batch.reference - batch.logprobs).square()).sum())

    to_reference.needs_reference = True  # type: ignore[attr-defined]

    def reference(engine: Engine) -> list[float]:
        seen.clear()
        engine.step(batch, to_reference)
        return sorted(seen)

    def keeps(engine: Engine) -> bool:
        return engine._job.group._worker._own.reference is not None  # type: ignore[attr-defined]

    engine = open_verl(ALONE, optimizer=OptimizerConfig(lr=1e-2))
    first = engine.logprobs(batch)
    expected = sorted(float(value) for row, own in zip(batch, first, strict=True) for value in own[row.weights != 0])
    engine.step(batch, LOSS)
    engine.save(tmp_path / "state")
    assert not keeps(engine)
    np.testing.assert_allclose(reference(engine), expected, atol=1e-5)
    assert keeps(engine)
    engine.load(tmp_path / "state")
    np.testing.assert_allclose(reference(engine), expected, atol=1e-5)
    moved = engine.logprobs(batch)
    assert max(float(np.nanmax(np.abs(now - then))) for now, then in zip(moved, first, strict=True)) > 1e-3
    engine.close()
    fresh = open_verl(ALONE, optimizer=OptimizerConfig(lr=1e-2))
    np.testing.assert_allclose(reference(fresh), expected, atol=1e-5)
    fresh.load(tmp_path / "state")
    np.testing.assert_allclose(reference(fresh), expected, atol=1e-5)
    fresh.close()
    resumed = open_verl(ALONE, optimizer=OptimizerConfig(lr=1e-2))
    resumed.load(tmp_path / "state")
    np.testing.assert_allclose(reference(resumed), expected, atol=1e-5)


class Elsewhere:
    """In the place of verl's offloading, which leaves tensors of a CPU where they are: outside of a mode they are NaN."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.kept = engine, list[tuple[torch.Tensor, torch.Tensor]]()

    def to(self, device: str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Called when a mode begins, and when it ends."""
        for tensor, value in self.kept:
            tensor.copy_(value)
        ends, self.kept = not self.kept, []
        if ends:
            self.leave()

    def leave(self) -> None:
        moments = [value for state in self.engine.optimizer.state.values() for value in state.values()]
        for tensor in (*self.engine.module.parameters(), *moments):
            local = getattr(tensor.detach(), "_local_tensor", tensor.detach())
            self.kept.append((local, local.clone()))
            local.fill_(float("nan"))


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8)], ids=["whole", "adapters"])
def test_what_is_kept_elsewhere_is_brought_before_it_is_read_or_written(
    open_verl: OpenVerl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lora: LoraConfig | None
) -> None:
    sharding = {"param_offload": True, "optimizer_offload": True}
    plain = open_verl(ALONE, lora=lora)
    for batch in (rows(0), rows(1)):
        plain.step(batch, CALLS)
    plain.save(tmp_path / "plain")
    expected = load_file(plain.weights(tmp_path / "expected"))
    after = plain.step(rows(2), CALLS).metrics
    plain.close()

    engine = open_verl(ALONE, lora=lora, **{"verl.sharding": sharding})
    worker = engine._job.group._worker  # type: ignore[attr-defined]
    elsewhere = Elsewhere(worker.engine)
    monkeypatch.setattr(worker.engine, "to", elsewhere.to)
    with torch.no_grad():
        elsewhere.leave()
        for batch in (rows(0), rows(1)):
            engine.step(batch, CALLS)
        found = load_file(engine.weights(tmp_path / "found"))
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        engine.save(tmp_path / "state")
        engine.step(rows(3), LOSS)
        for state in ("state", "plain"):
            engine.load(tmp_path / state)
            found = load_file(engine.weights(tmp_path / "found"))
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            assert engine.step(rows(2), CALLS).metrics == pytest.approx(after)


def test_bfloat16_rounds_no_logprob(open_verl: OpenVerl, model: Path) -> None:
    """The softmax is float32, whatever the model computes in."""
    found = np.concatenate([row[1:] for row in open_verl(ALONE, dtype="bfloat16").logprobs(rows(0))])
    rounded = torch.from_numpy(found).bfloat16().float().numpy()
    assert (found != rounded).mean() > 0.9


def test_a_relative_folder_and_a_new_start(
    open_verl: OpenVerl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = open_verl(ALONE)
    engine.step(rows(0), LOSS)
    engine.save(Path("state"))
    monkeypatch.chdir("/")
    engine.load(tmp_path / "state")
    with pytest.raises(EngineError, match="has no head: open it with head="):
        engine.values(rows(0))
    with pytest.raises(EngineError, match="no head to learn them: open it with head="):
        engine.step(valued(rows(0)), LOSS)
    engine.close()
    other = open_verl(ALONE, critic=True)
    with pytest.raises(EngineError, match="saved without a head, but this engine was opened with a critic on a frozen"):
        other.load(tmp_path / "state")
    batch = [replace(row, spans=(replace(row.spans[0], value_target=1e30, value_weight=1.0),)) for row in rows(0, 2)]
    skipped = other.step([replace(row, weights=np.zeros_like(row.weights)) for row in batch], LOSS)
    assert (skipped.metrics["skipped_nonfinite"], skipped.metrics["stepped"]) == (1.0, 0.0), (
        "its value loss is infinite"
    )
    assert all(not own.any() for own in other.values(batch))
    with pytest.raises(EngineError, match="call open"):
        engine.step(rows(1), LOSS)


def test_a_ray_that_does_not_start_is_told(open_verl: OpenVerl, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_busy(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", too_busy)
    with pytest.raises(
        EngineError, match=r"did not start .* timed out during startup\. .*engine\.verl\.address = auto"
    ):
        open_verl(1)


def test_updates_of_parts_and_passes_are_those_of_the_torch_engine(
    open_verl: OpenVerl, model: Path, tmp_path: Path
) -> None:
    """Three mini-batches, two epochs, a falling rate: the weights agree after two such steps."""
    several = replace(UNCLIPPED, minibatches=3, epochs=2)
    ours = TorchEngine(device="cpu")
    ours.open(model, several, seed=0)
    theirs = open_verl(ALONE, optimizer=several)
    samples = rows(3)
    for _ in range(2):
        one, other = ours.step(samples, LOSS).metrics, theirs.step(samples, LOSS).metrics
        assert (one["updates"], one["lr"]) == (other["updates"], other["lr"]) == (6.0, one["lr"])
    mine, their_own = load_file(ours.weights(tmp_path / "ours")), load_file(theirs.weights(tmp_path / "theirs"))
    for name, value in mine.items():
        np.testing.assert_allclose(value.float().numpy(), their_own[name].float().numpy(), atol=2e-5)
    ours.close()


def test_a_loop_of_ones_own_runs_on_workers(open_verl: OpenVerl, tmp_path: Path) -> None:
    """Two calls of `forward_backward` and an `optim_step` are the step on all rows."""
    samples = rows(4)
    whole = open_verl(ALONE, optimizer=UNCLIPPED)
    whole.step(samples, LOSS)
    expected = load_file(whole.weights(tmp_path / "whole"))
    whole.close()
    parts = open_verl(ALONE, optimizer=UNCLIPPED)
    parts.forward_backward(samples[:3], LOSS)
    parts.forward_backward(samples[3:], LOSS)
    assert parts.optim_step().metrics["stepped"] == 1.0
    for name, value in load_file(parts.weights(tmp_path / "parts")).items():
        np.testing.assert_allclose(value.float().numpy(), expected[name].float().numpy(), atol=2e-5)
    assert parts.taken.steps == 1
