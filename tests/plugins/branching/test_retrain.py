"""A whole run trained again from its store has the same weights, bit for bit; what differs or cannot be proven is named."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.app import main
from lightning.cli.output import locate, with_store
from lightning.config.plugin_settings import Config
from lightning.types import StepRecord
from lightning_branching.retrain import Retraining, _machine_settings, retrain
from lightning_proof.bring_forward import Rewinder
from safetensors.torch import load_file, save_file

from tests.core.trainer import test_tiny_run
from tests.core.trainer.test_tiny_run import train as train

KEPT: dict[str, Any] = {"trainer__keep_checkpoints": 1, "trainer__checkpoint_every": None}


def steps_of(folder: Path) -> list[StepRecord]:
    url, run = locate(str(folder), folder.parent)
    return asyncio.run(with_store(url, lambda store: store.steps(run)))


def retrained(folder: Path, **how: Any) -> Retraining:
    url, run = locate(str(folder), folder.parent)
    return asyncio.run(with_store(url, lambda store: retrain(store, run, folder, **how)))


def test_every_step_is_equal_bit_for_bit_also_over_a_change_of_settings(train: Any, capsys: Any) -> None:
    folder = train("run", 2, **KEPT)
    train("run", 4, resume=True, engine__lr=3e-3, **KEPT)
    assert retrained(folder) == Retraining("run", 4, 4, equal=True)
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(folder), "--train"])
    assert not ended.value.code
    assert "run: 4 steps taken again, the weights of 4 compared: equal, bit for bit" in capsys.readouterr().out


def test_the_record_of_a_run_names_no_host_and_no_module_of_the_workers_that_train_it_again(train: Any) -> None:
    theirs = {
        "address": "evil.example:6379",
        "model": {"external_lib": "evil"},
        "optimizer": {"optimizer_impl": "evil"},
    }
    folder = train("run", 1, engine__verl=theirs)
    opened: list[Config] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rewinder, "_open", lambda self, engine, config, *_: opened.append(config))
        retrained(folder)
    assert [config.engine.verl for config in opened] == [Config().engine.verl]


def test_a_reward_that_was_changed_is_found_at_its_step(train: Any) -> None:
    folder = train("run", 3)
    with sqlite3.connect(folder / "lightning.db") as database:
        database.execute(
            "UPDATE rollouts SET reward = reward + 1 WHERE id = (SELECT id FROM rollouts WHERE trained_at_step = 2 LIMIT 1)"
        )
    database.close()
    found = retrained(folder)
    assert (found.equal, found.step) == (False, 2)
    assert "step 2 of run cannot be replayed, since the same rollouts make another batch now" in str(found)


def test_other_weights_are_found_with_how_far_they_are(train: Any) -> None:
    folder = train("run", 2)
    file = folder / "checkpoints" / "step-00000002" / "weights.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] += 0.5
    save_file(tensors, file)
    found = retrained(folder)
    assert (found.equal, found.step) == (False, 2)
    assert "the weights after it are others than in its checkpoint, by up to 0.5" in str(found)


def test_what_stands_in_the_way_of_a_proof_is_said(train: Any, tmp_path: Path) -> None:
    folder = train("run", 1)
    model = tmp_path / "folder"
    moved = model.rename(tmp_path / "moved")
    found = retrained(folder)
    assert found.equal is None
    assert f"the model that it began with is not at {model}: say where it is (--model)" in str(found)
    assert retrained(folder, model=moved).equal
    with (moved / "model.safetensors").open("ab") as file:
        file.write(b" ")
    assert "are not those that it began with" in retrained(folder, model=moved).why


def test_an_algorithm_of_ones_own_cannot_be_taken_again(train: Any) -> None:
    from lightning import LightningRL
    from lightning.credit import identical

    def mine(group: Any, advantage: Any) -> Any:
        return identical(group, advantage)

    folder = train("run", 1, algorithm=LightningRL(credit=mine, group_size=4))  # type: ignore[arg-type]
    found = retrained(folder)
    assert found.equal is None
    assert "only its own code can make again" in found.why


@pytest.mark.parametrize("transfer", ["file", "gloo"])
def test_adapters_are_compared_as_they_were_handed_over(train: Any, transfer: str) -> None:
    folder = train("run", 2, engine__lora={"rank": 2}, policy_server__weight_transfer=transfer)
    assert retrained(folder) == Retraining("run", 2, 2, equal=True)


def test_a_first_step_that_taught_nothing_is_equal(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def agent(task: Any, llm: Any) -> float:
        reward = original(task, llm)
        ended.append(1)
        return 1.0 if len(ended) <= 8 else float(reward) + len(ended) % 2

    original: Any = test_tiny_run.agent
    monkeypatch.setattr(test_tiny_run, "agent", agent)
    folder = train("run", 3)
    assert [record.metrics["stepped"] for record in steps_of(folder)][:2] == [0.0, 1.0]
    assert retrained(folder).equal


def test_without_a_checkpoint_of_the_last_step_nothing_is_proven(train: Any) -> None:
    folder = train("run", 1)
    shutil.rmtree(folder / "checkpoints")
    found = retrained(folder)
    assert found.equal is None
    assert "the weights after 1 of 1 step are nowhere recorded" in found.why


def test_the_last_step_of_policies_is_compared_with_the_checkpoint_of_each(train: Any) -> None:
    folder = train("run", 2, policies__writer__agents=["*"], engine__lora={"rank": 2}, **KEPT)
    assert retrained(folder) == Retraining("run", 2, 2, equal=True)
    file = folder / "checkpoints" / "step-00000002" / "writer" / "weights.safetensors"
    save_file({name: tensor + 0.5 for name, tensor in load_file(file).items()}, file)
    found = retrained(folder)
    assert (found.equal, found.step) == (False, 2)
    assert "the weights of writer after it are others than in its checkpoint, by up to 0.5" in str(found)


def test_of_numbers_that_differed_between_policies_the_least_is_taken() -> None:
    context = {"threads": 2, "tokens_per_microbatch": {"writer": 512, "editor": 1024, "new": None}}
    settings = _machine_settings(StepRecord("run", 1, 1, (), (), "", context=context))
    assert (settings["threads"], settings["tokens_per_microbatch"]) == (2, 512)
