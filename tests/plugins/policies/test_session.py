"""A loop of one's own has the policies of its run by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.config import Config, with_settings
from lightning.errors import DataError
from lightning.plugins import plugins
from lightning.store.places import store_in
from lightning.trainer import Trainer
from lightning_proof.audit import audit
from lightning_session.session import Session

from tests.core.trainer.test_tiny_run import equal, model, state
from tests.core.trainer.test_tiny_run import train as train

from .test_models import POLICIES, crew

Made = Callable[..., Trainer]


@pytest.fixture
def trainer(train: Any, tmp_path: Path) -> Made:
    """`trainer(out, ...)`: a trainer of the tiny model of `train`, on its scripted vLLM."""

    def make(out: str, **settings: Any) -> Trainer:
        given = {"runner.concurrency": 4, "engine.lr": 1e-3, "trainer.steps": 4, "trainer.keep_checkpoints": 9}
        config = with_settings(Config(), given | {key.replace("__", "."): value for key, value in settings.items()})
        algorithm = "grpo:group_size=4,correction.kind=none"
        return Trainer(
            tmp_path / "folder", algorithm, runner="inline", config=config, out=tmp_path / out, progress=False
        )

    return make


async def take(session: Session, policies: list[str] | None = None, lr: float | None = None) -> dict[str, float]:
    batch = await session.batch(await session.rollout(["one", "two"]), policies)
    await session.forward_backward(batch)
    await session.optim_step(lr)
    return dict(await session.publish())


async def test_a_session_trains_one_policy_alone_and_each_at_its_rate(trainer: Made, tmp_path: Path) -> None:
    async with trainer("run", **POLICIES, policies__editor__lr=5e-4).session(crew) as session:
        writer, editor, judge = session.policies.values()
        assert [(each.name, each.agents, each.trained) for each in (writer, editor, judge)] == [
            ("writer", ("model:writer",), True),
            ("editor", ("model:editor",), True),
            ("judge", ("model:judge",), False),
        ]
        assert (writer.lr, editor.lr, judge.lr) == (1e-3, 5e-4, None)
        metrics = await take(session)
        assert editor.metrics["gradient_share"] + writer.metrics["gradient_share"] == pytest.approx(1)
        assert all(each.metrics.keys() >= {"loss", "grad_norm", "tokens"} for each in (writer, editor))
        assert (metrics["policy/writer/lr"], writer.metrics["lr"], editor.metrics["lr"]) == (1e-3, 1e-3, 5e-4)
        assert (judge.metrics, metrics["drift_tokens"]) == ({}, 0)

        writer.lr = 2e-3
        await take(session, ["writer"], lr=9.0)
        assert (writer.metrics["lr"], editor.metrics) == (2e-3, {})
        writer.lr = None
        await take(session, lr=2e-3)
        assert (writer.metrics["lr"], editor.metrics["lr"]) == (2e-3, 1e-3)

        groups = await session.rollout(["one"])
        rows = [row for row in (await session.batch(groups)).samples if row.policy == "writer"]
        both = [await policy.logprobs(rows) for policy in (writer, editor)]
        assert not all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(*both, strict=True))
        exported = await writer.export(tmp_path / "exported")
        for refused in (judge.logprobs(rows), judge.export(tmp_path / "judge")):
            with pytest.raises(DataError, match="the policy judge is not trained, so it"):
                await refused
        for named in (["judge"], ["nobody"], [], "writer"):
            with pytest.raises(DataError, match=r"give a list of trained policies \(writer, editor\), and not"):
                await session.batch(groups, named)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="lr = 0 of the policy writer"):
            writer.lr = 0

    run = tmp_path / "run"
    steps = [state(run / f"checkpoints/step-0000000{step}/editor") for step in (1, 2, 3)]
    assert equal(steps[0], steps[1]), "the editor rested"
    assert not equal(steps[1], steps[2])
    assert equal(model(exported), model(run / "model" / "writer"))
    async with plugins().opened_store(store_in(run)) as store:
        assert (await audit(store, "run")).ok


async def test_the_one_policy_of_a_run_has_a_name_too(trainer: Made, tmp_path: Path) -> None:
    async with trainer("run").session(crew) as session:
        ((name, policy),) = session.policies.items()
        assert (name, policy.name, policy.trained, policy.lr) == ("policy", "policy", True, 1e-3)
        policy.lr = 2e-3
        await take(session, ["policy"], lr=9.0)
        assert (policy.metrics["lr"], policy.metrics["gradient_share"]) == (2e-3, 1.0)
        exported = await policy.export(tmp_path / "exported")
    assert equal(model(exported), model(tmp_path / "run" / "model"))
