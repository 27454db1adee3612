"""A run with a teacher: it is named in each step, found again by its digest, and refused by name where it does not fit."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning import Distill, LightningRL, Trainer
from lightning.algorithms.protocol import Algorithm, teacher_of
from lightning.batch import Group
from lightning.cli.output import locate, with_store
from lightning.config import Config, with_settings
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import AuditError, ConfigError
from lightning.store.protocol import Store
from lightning.store.sqlite.store import SqliteStore
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer import trainer as opening
from lightning.trainer.algorithm import AlgorithmSchedule, resolve_schedule
from lightning.trainer.context import Teacher, base_digest, reference_of
from lightning.types import StepRecord
from lightning_branching.retrain import retrain
from lightning_finetuning.teacher import check_same_tokens, check_teacher, teacher_named
from lightning_proof.audit import audit
from lightning_proof.bring_forward import take_again, teacher_again

from tests.core.trainer.test_families import agent
from tests.core.trainer.test_tiny_run import equal, model
from tests.core.trainer.test_tiny_run import train as train


def steps_of(folder: Path) -> list[StepRecord]:
    url, run = locate(str(folder), folder.parent)
    return asyncio.run(with_store(url, lambda store: store.steps(run)))


def test_a_runs_step_teaches_and_each_step_names_it(train: Any) -> None:
    parent = train("parent", 2)
    folder = train("student", 2, algorithm=Distill("parent@1", group_size=1))
    (made,) = (folder / "teacher").iterdir()
    assert not equal(model(made), model(parent / "model"))  # the first step's, and not the last one's
    records = steps_of(folder)
    digest = base_digest(made)
    named = {"name": "parent@1", "model": str(made.resolve()), "sha256": digest}
    assert [record.context["teacher"] for record in records] == [named, named]
    assert all(record.metrics["teacher_kl"] for record in records)
    assert [len(record.rollouts) for record in records] == [2, 2]
    assert digest != records[0].context["base"] == base_digest(parent.parent / "folder")
    shutil.rmtree(folder / "teacher")  # an audit asks no teacher
    url, run = locate(str(folder), folder.parent)
    report = asyncio.run(with_store(url, lambda store: audit(store, run)))
    assert (report.ok, report.rederived) == (True, True)


def test_it_is_trained_again_to_the_same_weights_and_not_with_another_teacher(train: Any) -> None:
    train("parent", 2)
    folder = train("student", 2, algorithm=Distill("parent@2", group_size=2))
    url, run = locate(str(folder), folder.parent)
    assert asyncio.run(with_store(url, lambda store: retrain(store, run, folder))).equal
    (made,) = (folder / "teacher").iterdir()
    weights = next(made.glob("*.safetensors"))
    kept = weights.read_bytes()
    shutil.copyfile(folder.parent / "folder" / "model.safetensors", weights)
    found = asyncio.run(with_store(url, lambda store: retrain(store, run, folder)))
    assert found.equal is None
    assert "taken with the teacher parent@2" in found.why
    assert "are another model's by now" in found.why
    weights.write_bytes(kept)
    (record, *_) = steps_of(folder)
    for other in (None, Teacher("other", folder, "0" * 64)):
        with pytest.raises(AuditError, match=r"was taken with the teacher parent@2 .* cannot be taken again with"):
            asyncio.run(
                with_store(url, lambda store, other=other: take_again(store, record, [], [], None, 1e-3, other))
            )  # type: ignore[misc, arg-type]


def test_a_run_goes_on_with_its_teacher_and_begins_an_epoch_with_another(train: Any) -> None:
    train("parent", 2)
    sparse = {"trainer__checkpoint_every": 9}
    folder = train("student", 1, algorithm=Distill("parent@1", group_size=2), **sparse)
    straight = train("straight", 3, algorithm=Distill("parent@1", group_size=2), **sparse)
    shutil.rmtree(folder.parent / "parent")  # the step that was written is kept
    train("student", 3, resume=True, algorithm=Distill("parent@1", group_size=2), **sparse)
    assert len(steps_of(folder)) == len(steps_of(straight)) == 3
    for file in (folder / "checkpoints").iterdir():
        shutil.rmtree(file)  # so that its steps are taken again, with the teacher that they had
    train("student", 4, resume=True, algorithm=Distill(str(folder.parent / "folder"), group_size=2), **sparse)
    teachers = [record.context["teacher"]["name"] for record in steps_of(folder)]  # type: ignore[index, call-overload]
    assert teachers == ["parent@1"] * 3 + [str(folder.parent / "folder")]
    url, run = locate(str(folder), folder.parent)
    assert asyncio.run(with_store(url, lambda store: retrain(store, run, folder))).equal


@pytest.mark.parametrize(
    ("teacher", "problem"),
    [
        ("parent@9", "the teacher parent@9 is not there: run parent has 1 committed steps: there is no parent@9"),
        ("nobody@1", "the teacher nobody@1 is not there: no run 'nobody'"),
        ("parent", "the teacher parent is a run: say which step of it, as parent@20"),
        ("no/such/folder", "the teacher no/such/folder is not there: the model folder .* does not exist"),
    ],
)
def test_a_teacher_that_is_not_there_is_named_before_anything_is_started(
    train: Any, tmp_path: Path, teacher: str, problem: str
) -> None:
    train("parent", 1)
    with pytest.raises(ConfigError, match=problem):
        train("student", 1, algorithm=Distill(teacher))
    assert not (tmp_path / "student" / "run.json").exists()


@pytest.mark.parametrize("problem", ["has no weights: ", "cannot be loaded: cannot load a causal language model from"])
def test_a_teacher_without_whole_weights_is_named_before_anything_is_started(
    train: Any, tmp_path: Path, problem: str
) -> None:
    train("parent", 1)
    folder = shutil.copytree(tmp_path / "folder", tmp_path / "broken")
    (folder / "model.safetensors").unlink()
    if "no weights" not in problem:
        (folder / "model.safetensors").write_bytes(b"half of it")
    with pytest.raises(ConfigError, match=f"the teacher {folder} {problem}"):
        train("student", 1, algorithm=Distill(str(folder), group_size=1))
    assert not (tmp_path / "student" / "run.json").exists()


def test_a_teacher_of_other_tokens_is_refused_by_name(train: Any, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", vocab=400)
    with pytest.raises(ConfigError, match=f"the teacher in {other} has another vocabulary than the student in"):
        train("student", 1, algorithm=Distill(str(other)))
    assert not (tmp_path / "student" / "run.json").exists()


def test_what_differs_of_two_vocabularies_is_told(tmp_path: Path, warnings_of: Any) -> None:
    student = make_tiny_model(tmp_path / "student", vocab=320)
    same = make_tiny_model(tmp_path / "same", vocab=320, hidden=128, architecture="llama", seed=3)
    check_same_tokens(student, same)
    assert not warnings_of()
    larger = make_tiny_model(tmp_path / "larger", vocab=330)
    with pytest.raises(
        ConfigError, match=r"\(330 tokens, not 320: .* is 316 to the student and 326 to the teacher; .*, and 11 more"
    ):
        check_same_tokens(student, larger)
    swapped = shutil.copytree(same, tmp_path / "swapped")
    text = json.loads((swapped / "tokenizer.json").read_text())
    text["model"]["vocab"]["a"], text["model"]["vocab"]["b"] = text["model"]["vocab"]["b"], text["model"]["vocab"]["a"]
    (swapped / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match=r"'a' is \d+ to the student and \d+ to the teacher; 'b' is"):
        check_same_tokens(student, swapped)
    narrow = shutil.copytree(same, tmp_path / "narrow")
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    with pytest.raises(ConfigError, match=r"has logits for 300 token ids and the student in .* for 320"):
        check_same_tokens(student, narrow)
    ends = shutil.copytree(same, tmp_path / "ends")
    settings = json.loads((ends / "tokenizer_config.json").read_text())
    (ends / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|endoftext|>"}))
    check_same_tokens(student, ends)
    assert any("its own end is unlikely" in text for text in warnings_of())
    for file in narrow.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"narrow has no tokenizer .*: copy the tokenizer's files there"):
        check_same_tokens(student, narrow)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 320}))
    with pytest.raises(ConfigError, match=r"bare has no tokenizer"):  # transformers would make one up
        check_same_tokens(student, bare)
    (narrow / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"the tokenizer in .* cannot be read"):
        check_same_tokens(student, narrow)


def test_a_schedule_has_one_reference_model() -> None:
    assert teacher_named(_phases("distill:3:teacher=a@1,grpo:2")) == "a@1"
    assert not teacher_named(_phases("grpo"))
    with pytest.raises(ConfigError, match="a run has one teacher, and the schedule has a@1 and b@1"):
        teacher_named(_phases("distill:3:teacher=a@1,distill:2:teacher=b@1"))
    with pytest.raises(
        ConfigError, match=r"lightning_rl compares with the model .* reference model is the teacher a@1"
    ):
        teacher_named(_phases("distill:3:teacher=a@1,grpo:2:kl_coefficient=0.1"))
    with pytest.raises(ConfigError, match="dpo compares with the model that training began with"):
        teacher_named(_phases("distill:3:teacher=a@1,dpo:2"))
    assert not teacher_named(AlgorithmSchedule.of(LightningRL(kl_coefficient=0.1)).phases)


def _phases(text: str) -> Sequence[tuple[int, Algorithm]]:
    made = resolve_schedule(text)
    assert isinstance(made, AlgorithmSchedule)
    return made.phases


def test_a_teacher_is_known_by_its_digest_wherever_it_lies(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "teacher")
    then = Teacher("a@1", tmp_path / "before", base_digest(folder))
    here = replace(then, folder=folder)
    assert teacher_again(then, here) == here
    with pytest.raises(ConfigError, match=r"which is not at .*before any more: bring it back there"):
        teacher_again(then, replace(here, digest="0" * 64))
    run = tmp_path / "moved"
    kept = shutil.copytree(folder, run / "teacher" / "before")
    assert teacher_again(then, None, run) == replace(then, folder=kept)
    with pytest.raises(ConfigError, match=r"are another model's by now"):
        teacher_again(replace(then, digest="0" * 64), None, run)


def test_a_run_that_was_moved_is_trained_again_and_goes_on_with_the_teacher_in_its_folder(train: Any) -> None:
    train("parent", 2)
    sparse = {"trainer__checkpoint_every": 9}
    folder = train("student", 2, algorithm=Distill("parent@2", group_size=1), **sparse)
    moved = folder.rename(folder.with_name("moved"))
    shutil.rmtree(folder.parent / "parent")
    url, run = locate(str(moved), moved.parent)
    assert asyncio.run(with_store(url, lambda store: retrain(store, run, moved))).equal
    for file in (moved / "checkpoints").iterdir():
        shutil.rmtree(file)  # so that its steps are taken again
    train("moved", 3, resume=True, **sparse)
    assert len(steps_of(moved)) == 3


def test_a_teacher_whose_files_changed_is_refused_by_a_resume_and_told_by_an_audit(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = train("parent", 2)
    teacher = shutil.copytree(parent / "model", tmp_path / "teaches")
    folder = train("student", 2, algorithm=Distill(str(teacher), group_size=1))
    then = base_digest(teacher)
    shutil.copyfile(tmp_path / "folder" / "model.safetensors", teacher / "model.safetensors")
    now = base_digest(teacher)
    told = rf"the teacher {teacher} .* has changed: the SHA-256 of its weights is {now[:12]}\.\.\. now, and was {then[:12]}"
    with pytest.raises(ConfigError, match=told):
        train("student", 3, algorithm=Distill(str(teacher), group_size=1), resume=True)
    first, last = steps_of(folder)
    changed = replace(last, context={**last.context, "teacher": Teacher(str(teacher), teacher, now).described()})

    async def steps(store: Store, run: str) -> list[StepRecord]:
        return [first, changed]

    url, run = locate(str(folder), folder.parent)
    assert not asyncio.run(with_store(url, lambda store: audit(store, run))).warnings
    monkeypatch.setattr(SqliteStore, "steps", steps)
    (warning,) = asyncio.run(with_store(url, lambda store: audit(store, run))).warnings
    assert f"from step 2 on the teacher {teacher} is another model than before: SHA-256 {then[:12]}" in warning


def test_a_step_that_was_written_for_a_start_that_failed_is_not_kept(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise ConfigError("the start fails")

    train("parent", 1)
    with monkeypatch.context() as patch:
        patch.setattr(opening, "base_digest", fail)
        with pytest.raises(ConfigError, match="the start fails"):
            train("student", 1, algorithm=Distill("parent@1", group_size=1))
    (made,) = (tmp_path / "student" / "teacher").iterdir()
    before = model(made)
    shutil.rmtree(tmp_path / "parent")
    parent = train("parent", 1, engine__lr=1e-2)
    train("student", 1, algorithm=Distill("parent@1", group_size=1))
    assert equal(model(made), model(parent / "model"))
    assert not equal(model(made), before)


def test_a_checkpoint_that_goes_away_while_it_is_read_is_told(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train("parent", 2)
    load = TorchEngine.load

    def gone(engine: TorchEngine, folder: Path) -> None:
        shutil.rmtree(folder)
        load(engine, folder)

    monkeypatch.setattr(TorchEngine, "load", gone)
    with pytest.raises(ConfigError, match=r"the teacher parent@1 is not there: parent@1 cannot be made again"):
        train("student", 1, algorithm=Distill("parent@1"))
    with pytest.raises(ConfigError, match=r"parent@2 cannot be made again"):
        train("forked", 1, from_run="parent@2", engine__lora={"rank": 2})


class OldEngine:
    """An engine that was written before there were teachers."""

    def open(self, model: Path, optimizer: object, *, seed: int, head: object = None) -> None: ...


def test_an_engine_that_takes_no_teacher_is_named(tmp_path: Path) -> None:
    engine: Any = OldEngine()
    assert reference_of(engine, None) == {}
    with pytest.raises(ConfigError, match=r"the engine OldEngine takes no teacher .* from a@1"):
        check_teacher(engine, Teacher("a@1", tmp_path, ""))
    assert reference_of(TorchEngine(), Teacher("a@1", tmp_path, "")) == {"reference": tmp_path}


def test_an_algorithm_of_somebodys_own_may_have_no_teacher() -> None:
    algorithm: Any = SimpleNamespace(teacher=None)
    assert not teacher_of(algorithm)


def test_a_loop_of_ones_own_has_a_teacher_and_a_buffer(train: Any, tmp_path: Path) -> None:
    """Both in one run: what is trained again is judged by the teacher anew."""
    train("parent", 2)
    settings = {"trainer.max_reuse": 1, "trainer.max_staleness": 1, "engine.lr": 1e-3, "runner.concurrency": 4}
    trainer = Trainer(
        tmp_path / "folder",
        Distill("parent@2", group_size=1),
        runner="inline",
        config=with_settings(Config(), settings),
        out=tmp_path / "own",
        progress=False,
    )

    async def loop() -> list[float]:
        found, old = [], list[Group]()
        async with trainer.session(agent) as session:
            for _ in range(2):
                new = await session.rollout(["one", "two"])
                batch = await session.batch([*new, *old])
                await session.forward_backward(batch)
                await session.optim_step()
                found.append(dict(await session.publish()))
                old = new
        return [step.get("reused", 0.0) for step in found if step["teacher_kl"]]

    assert asyncio.run(loop()) == [0.0, 2.0]
    url, run = locate(str(tmp_path / "own"), tmp_path)
    report = asyncio.run(with_store(url, lambda store: audit(store, run)))
    assert (report.ok, report.rollouts, report.reused) == (True, 4, 2)
    again = asyncio.run(with_store(url, lambda store: retrain(store, run, tmp_path / "own")))
    assert (again.equal, again.why.partition(" (")[0]) == (None, "step 1 was taken by a loop of its own")
    assert all(record.context["teacher"]["name"] == "parent@2" for record in steps_of(tmp_path / "own"))  # type: ignore[index, call-overload]
