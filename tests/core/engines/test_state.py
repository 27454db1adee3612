"""Saving and resuming: bit for bit, atomically, and only into the model it belongs to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.batch.sample import Sample
from lightning.config import LoraConfig
from lightning.engines import files
from lightning.engines.torch import state
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import EngineError
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from safetensors.torch import load_file, save_file

Open = Callable[..., TorchEngine]
Make = Callable[..., Sample]
LOSS = ClippedPolicyGradient(entropy_coefficient=0.01, correction=NO_CORRECTION)


def train(engine: TorchEngine, make_row: Make, seeds: range) -> list[dict[str, float]]:
    history = []
    for seed in seeds:
        rows = [make_row(10 + 3 * i, [(4, 10, 1.0 - i, 0.1)], seed=100 * seed + i, name=f"r{i}") for i in range(3)]
        history.append(dict(engine.step(rows, LOSS).metrics))
    return history


@pytest.mark.parametrize(
    "arguments",
    [{}, {"lora": LoraConfig(rank=4)}, {"dtype": "bfloat16"}],
    ids=["full", "lora", "bfloat16"],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    open_engine: Open, make_row: Make, tmp_path: Path, arguments: dict[str, object]
) -> None:
    first = open_engine(**arguments)
    train(first, make_row, range(3))
    first.save(tmp_path / "state")
    went_on = train(first, make_row, range(3, 6))
    second = open_engine(seed=99, **arguments)
    second.load(tmp_path / "state")
    assert train(second, make_row, range(3, 6)) == went_on
    for name, value in first._parameters.items():
        assert torch.equal(value, second._parameters[name])


def test_a_fresh_state_can_be_saved_and_loaded(open_engine: Open, make_row: Make, tmp_path: Path) -> None:
    first, second = open_engine(), open_engine()
    first.save(tmp_path / "state")
    train(second, make_row, range(2))
    second.load(tmp_path / "state")
    assert train(first, make_row, range(2)) == train(second, make_row, range(2))


def test_the_microbatch_size_that_memory_allowed_is_kept(open_engine: Open, tmp_path: Path) -> None:
    first, second = open_engine(tokens_per_microbatch=77), open_engine()
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    assert second._budget == 77


def test_a_smaller_microbatch_than_the_states_is_taken_and_is_the_same_but_for_rounding(
    open_engine: Open, make_row: Make, tmp_path: Path
) -> None:
    first, second = open_engine(), open_engine(tokens_per_microbatch=16, step="tree", gradient_checkpointing=True)
    train(first, make_row, range(2))
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    (expected,), (found,) = train(first, make_row, range(2, 3)), train(second, make_row, range(2, 3))
    assert second._budget == 16
    assert found["microbatches"] > expected["microbatches"]
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_a_state_that_the_device_has_no_room_for_changes_nothing(
    open_engine: Open, make_row: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    train(engine, make_row, range(1))
    engine.save(tmp_path / "state")
    train(engine, make_row, range(1, 2))
    before = {name: value.detach().clone() for name, value in engine._parameters.items()}

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", full)  # the moments'; weights are copied to where they are
        with pytest.raises(EngineError, match=r"out of memory .*loading .*state.*engine\.lora"):
            engine.load(tmp_path / "state")
    assert all(torch.equal(value, before[name]) for name, value in engine._parameters.items())
    engine.load(tmp_path / "state")
    assert engine._driver.steps == 1


def test_there_is_no_pickle_in_it(open_engine: Open, make_row: Make, tmp_path: Path) -> None:
    engine = open_engine()
    train(engine, make_row, range(1))
    engine.save(tmp_path / "state")
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names == ["optimizer.safetensors", "random.safetensors", "state.json", "weights.safetensors"]
    assert json.loads((tmp_path / "state" / "state.json").read_text())["steps"] == 1


def test_a_failed_save_leaves_the_old_state(
    open_engine: Open, make_row: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    folder = tmp_path / "state"
    engine.save(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    train(engine, make_row, range(1))

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(EngineError, match=r"cannot write .*state.*No space left on device"):
        engine.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_an_older_state_is_replaced(open_engine: Open, make_row: Make, tmp_path: Path) -> None:
    engine = open_engine()
    engine.save(tmp_path / "state")
    train(engine, make_row, range(1))
    engine.save(tmp_path / "state")
    assert json.loads((tmp_path / "state" / "state.json").read_text())["steps"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_crash_between_the_renames_is_recovered(open_engine: Open, make_row: Make, tmp_path: Path) -> None:
    engine = open_engine()
    train(engine, make_row, range(1))
    engine.save(tmp_path / "state")
    (tmp_path / "state").rename(files._beside(tmp_path / "state", "old"))
    engine.load(tmp_path / "state")
    assert engine._driver.steps == 1


def spoil(file: Path, number: float) -> None:
    """Put this number into a tensor of a file."""
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[-1] = number
    save_file(tensors, file)


def test_a_state_that_is_not_finite_is_not_written_over_a_good_one(
    open_engine: Open, make_row: Make, tmp_path: Path
) -> None:
    engine = open_engine()
    train(engine, make_row, range(1))
    engine.save(tmp_path / "state")
    with torch.no_grad():
        name, parameter = next(iter(engine._parameters.items()))
        parameter.view(-1)[0] = float("inf")
    with pytest.raises(EngineError, match=rf"because {name} has numbers that are not finite: lower engine.*resume"):
        engine.save(tmp_path / "state")
    engine.load(tmp_path / "state")
    assert torch.isfinite(parameter).all()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "weights.safetensors").write_bytes(b"\x00" * 8), "not a whole training state"),
        (lambda folder: (folder / "state.json").unlink(), "With a plugin that .*Without one .*: give another `out`"),
        (lambda folder: (folder / "optimizer.safetensors").unlink(), "not a whole training state"),
        (lambda folder: (folder / "state.json").write_text("{"), "not a whole training state"),
        (lambda folder: spoil(folder / "weights.safetensors", float("nan")), "not finite.*: remove that folder"),
        (lambda folder: spoil(folder / "optimizer.safetensors", float("inf")), "not finite.*: remove that folder"),
        (
            lambda folder: (folder / "state.json").write_text('{"format": 3}'),
            "has format 3, but this version of lightning works with format 2 only",
        ),
    ],
)
def test_a_broken_state_is_refused_and_nothing_changed(
    open_engine: Open, make_row: Make, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    engine = open_engine()
    train(engine, make_row, range(1))
    engine.save(tmp_path / "state")
    train(engine, make_row, range(1))
    before = {name: value.detach().clone() for name, value in engine._parameters.items()}
    damage(tmp_path / "state")
    with pytest.raises(EngineError, match=message):
        engine.load(tmp_path / "state")
    assert all(torch.equal(value, before[name]) for name, value in engine._parameters.items())


def test_a_missing_state_is_named(open_engine: Open, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nowhere is not a whole training state"):
        open_engine().load(tmp_path / "nowhere")


def test_another_models_state_is_refused(open_engine: Open, tied_model: Path, tmp_path: Path) -> None:
    open_engine().save(tmp_path / "state")
    for other in (open_engine(tied_model), open_engine(lora=LoraConfig(rank=4))):
        with pytest.raises(EngineError, match="belongs to another model, dtype or LoRA setting"):
            other.load(tmp_path / "state")
