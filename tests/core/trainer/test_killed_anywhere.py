"""`kill -9` of a run's process at random moments: in the end its record is that of a run which nobody disturbed."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import multiprocessing
import random
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from lightning.gateway.identity import TokenSigner
from lightning.plugins import plugins
from lightning.testing.fake_vllm import Reply

from tests.core.trainer.conftest import open_bench

FORKS = multiprocessing.get_context("fork")
STEPS, LONGEST_LIFE = 12, 0.8
"""Steps of a run, and the seconds from the start of the loop until the kill, at most."""
BEFORE_THE_LOOP = 0.3
"""The share of the kills that fall while the run is being opened."""

pytestmark = pytest.mark.slow


def says(body: Any) -> Reply:
    """A model without chance: the same request has the same answer in each life of the run."""
    digest = hashlib.sha256(repr(body["messages"]).encode()).digest()
    return Reply("x" * (1 + digest[0] % 8))


async def asks(task: Any, llm: Any) -> float:
    """An agent whose two calls follow from its task and its rollout alone, so that siblings differ."""
    signer, total = TokenSigner(b"s" * 32), 0
    rollout = signer.verify(llm.api_key).rollout
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
        for call in range(2):
            said = f"{task.input} {rollout} {call}"
            body = {"model": llm.model, "messages": [{"role": "user", "content": said}]}
            async with session.post(f"{llm.base_url}/chat/completions", json=body) as reply:
                reply.raise_for_status()
                total += len((await reply.json())["choices"][0]["message"]["content"])
    return float(total % 3)


def live(folder: Path, opened: Any) -> None:
    """One life of the run's process; `opened` is set when the loop begins."""

    async def run() -> None:
        settings: dict[str, Any] = {"trainer__steps": STEPS, "trainer__eval_every": 10, "trainer__checkpoint_every": 1}
        async with open_bench(folder, asks, script=says, **settings) as made:
            opened.set()
            await made.loop.run({})

    asyncio.run(run())


async def record_of(folder: Path) -> list[tuple[object, ...]]:
    """What a run's record says of its steps, its rollouts and their calls, without times, ids of replies and numbers of
    attempts. `weights` is the digest of the trained rows of all steps before: `LedgerEngine` has them as its weights."""
    store = plugins().store(f"sqlite:///{folder / 'lightning.db'}")
    await store.open()
    try:
        steps = await store.steps("run")
        rollouts = sorted((await store.list_rollouts("run", limit=10_000)).items, key=lambda rollout: rollout.id)
        calls = await store.transitions_of([(rollout.id, rollout.attempt) for rollout in rollouts])
    finally:
        await store.close()
    kept = ("reward", "rollouts", "failed", "groups", "groups_used", "tokens", "drift_tokens", "loss")
    said: list[tuple[object, ...]] = [
        (
            each.step,
            each.policy_version,
            tuple(rollout for rollout, _ in each.rollouts),
            each.groups,
            each.context["weights"],
            each.context["epoch"],
            *(each.metrics.get(name) for name in kept),
        )
        for each in steps
    ]
    for rollout, made in zip(rollouts, calls, strict=True):
        tokens = [(call.seq, call.prompt_ids, call.response_ids, call.logprobs, call.versions) for call in made]
        said.append((rollout.id, rollout.status, rollout.reward, tokens))
    return said


def lives(folder: Path, kills: int) -> None:
    """An undisturbed run, then runs with as many kills together. All are made by forks of this process, which has imported
    everything for the first run, so that a life is short."""
    live(folder / "undisturbed", FORKS.Event())
    chance, done = random.Random(), 0
    for number in itertools.count():
        ended = None
        while ended != 0:
            opened = FORKS.Event()
            process = FORKS.Process(target=live, args=(folder / f"killed-{number}", opened))
            process.start()
            if done < kills:
                if chance.random() > BEFORE_THE_LOOP:
                    opened.wait()
                time.sleep(chance.uniform(0.0, LONGEST_LIFE))
                process.kill()
            process.join()
            ended = process.exitcode
            assert ended == 0 or (ended == -signal.SIGKILL and done < kills), "it ended by itself"
            done += ended != 0
        if done == kills:
            return


@pytest.mark.parametrize("kills", [8, pytest.param(40, marks=pytest.mark.long)])
def test_a_run_killed_at_random_moments_leaves_the_record_of_an_undisturbed_one(tmp_path: Path, kills: int) -> None:
    process = FORKS.Process(target=lives, args=(tmp_path, kills))
    process.start()
    process.join()
    assert process.exitcode == 0
    undisturbed = asyncio.run(record_of(tmp_path / "undisturbed"))
    assert len({step[4] for step in undisturbed[:STEPS]}) > STEPS // 2, "most steps changed the weights"
    killed = sorted(tmp_path.glob("killed-*"))
    assert killed
    for folder in killed:
        assert asyncio.run(record_of(folder)) == undisturbed, folder.name
