"""A replay buffer: rollouts in several steps, which say so, only so often, and are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.batch.trajectory import Group
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, DataError
from lightning.types import Task
from lightning_debug.rollout_calls import read_calls
from lightning_session.session import Session
from pydantic import ValidationError

Open = Callable[..., AbstractAsyncContextManager[Any]]
TASKS = [Task("one"), Task("two")]
BUFFER = {"own_loop": True, "trainer__max_reuse": 1, "trainer__max_staleness": 3}


async def take(session: Session, groups: Sequence[Group]) -> dict[str, float]:
    batch = await session.batch(groups)
    await session.forward_backward(batch)
    await session.optim_step(lr=0.5)
    return dict(await session.publish())


async def test_a_reuse_beyond_what_is_allowed_is_refused(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", **BUFFER) as made, Session(made.loop) as session:
        groups = await session.rollout(TASKS)
        await take(session, groups)
        await take(session, groups)
        with pytest.raises(DataError, match=r"in a step before \(2 in all\), and trainer.max_reuse = 1"):
            await session.batch(groups)
        assert session.step == 2
        name, _ = (await made.store.steps("run"))[0].rollouts[0]
        rollout = await made.store.get_rollout(name)
        assert rollout is not None
        read = await read_calls(made.store, rollout)
        assert (read.steps, {call.trained_in for call in read.calls}) == ((1, 2), {(1, 2)})


async def test_an_undeclared_reuse_is_refused_with_its_cure(bench: Open, tmp_path: Path) -> None:
    async with (
        bench(tmp_path / "run", own_loop=True, trainer__max_staleness=3) as made,
        Session(made.loop) as session,
    ):
        groups = await session.rollout(TASKS)
        await take(session, groups)
        with pytest.raises(DataError, match=r"set trainer.max_reuse for a replay buffer"):
            await session.batch(groups)


async def test_settings_that_allow_no_reuse_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = with_settings(Config(), {"trainer.max_reuse": 1})
    trainer = lightning.Trainer(tmp_path, out=tmp_path / "run", config=settings, progress=False)
    with pytest.raises(ConfigError, match=r"max_reuse = 1 with trainer.max_staleness = 0: .*Set trainer.max_staleness"):
        async with trainer.session(lambda task, llm: 0.0):
            pass
    with pytest.raises((ConfigError, ValidationError), match="max_reuse"):
        with_settings(Config(), {"trainer.max_reuse": -1})
