"""The loop against a scripted policy server: wherever it is cut, a resume ends where an undisturbed run does."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.audit import audit
from lightning.batch.digest import span_digest
from lightning.batch.sample import FloatArray, Sample
from lightning.config import Config, with_settings
from lightning.engines.protocol import OptimizerConfig, StepResult
from lightning.errors import AuditError, ConfigError, PolicyServerError, RunnerError
from lightning.gateway import Gateway, Upstream
from lightning.losses.protocol import Loss
from lightning.plugins import plugins
from lightning.policy_server.protocol import Probe, Update
from lightning.runner.inline import InlineRunner
from lightning.store.protocol import Store
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.tracking import Trackers
from lightning.trainer.loop import Loop
from lightning.trainer.progress import Reporter
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.stack import Stack
from lightning.trainer.summary import summarize
from lightning.types import Run, Task, token_ids

ALGORITHM = LightningRL("grpo", group_size=4)
TASKS = [Task(f"question {number}") for number in range(5)]
VAL = [Task(f"held out {number}") for number in range(3)]
STEPS = 3


class Crash(BaseException):
    """What a test throws where a `kill -9` would fall."""


@dataclass
class LedgerEngine:
    """An engine whose weights are the list of batches it was trained on, so that twice or never can be seen."""

    ledger: list[str] = field(default_factory=list)
    crash_at: str = ""

    def open(self, model: Path, optimizer: OptimizerConfig, *, seed: int, critic: bool = False) -> None:
        self.ledger = []

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        return [np.zeros(len(sample), dtype=np.float32) for sample in samples]

    def step(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        self._point(f"step:{len(self.ledger)}")
        text = hashlib.sha256()
        seen = {}
        for sample in samples:
            text.update(sample.ids.tobytes() + sample.advantages.tobytes())
            for span in sample.spans:
                ids, lps = sample.ids[span.start : span.stop], sample.logprobs[span.start : span.stop]
                seen[span.rollout, span.attempt, span.seq] = span_digest(token_ids(ids.tolist()), lps.tolist())
        self.ledger.append(text.hexdigest())
        return StepResult({"loss": 0.0, "max_logprob_gap": 0.0, "tokens": float(sum(map(len, samples)))}, seen)

    def save(self, folder: Path) -> None:
        self._point(f"save:{len(self.ledger)}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ledger.json").write_text(json.dumps(self.ledger))

    def load(self, folder: Path) -> None:
        self.ledger = json.loads((folder / "ledger.json").read_text())

    def export(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def weights(self, file: Path) -> Path:
        self._point(f"weights:{len(self.ledger)}")
        file.write_text(json.dumps(self.ledger))
        return file

    def close(self) -> None:
        pass

    def _point(self, name: str) -> None:
        if name == self.crash_at:
            raise Crash(name)


@dataclass
class LedgerPolicy:
    """A policy server on a scripted vLLM; its weights are the ledger it was last given."""

    fake: FakeVLLM
    version: int = 0
    ledger: list[str] = field(default_factory=list)
    crash_at: int = -1
    die_at: int = -1
    gap: float = 0.0
    restarted_with: int = -1
    restart_fails: bool = False
    died: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return self.fake.url

    @property
    def model(self) -> str:
        return self.fake.model

    async def start(self) -> None: ...

    async def update(self, weights: Path, version: int, probe: Probe | None = None) -> Update:
        if version == self.crash_at:
            raise Crash(f"update:{version}")
        if version == self.die_at:
            self.die_at = -1
            self.died.set()
            raise PolicyServerError("the connection was reset")
        self.ledger = json.loads(weights.read_text())
        self.version = version
        return Update(version, probe_gap=self.gap if probe else None)

    async def healthy(self) -> bool:
        return True

    async def wait_died(self) -> None:
        await self.died.wait()

    async def restart(self, weights: Path | None, version: int) -> None:
        self.died.clear()
        if self.restart_fails:
            raise PolicyServerError("no memory for a restart")
        self.version = self.restarted_with = version

    async def close(self) -> None: ...


async def agent(task: Task, llm: Any) -> float:
    """Calls the model twice; the reward depends on what it said."""
    total = 0
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
        for _ in range(2):
            body = {"model": llm.model, "messages": [{"role": "user", "content": str(task.input)}]}
            async with session.post(f"{llm.base_url}/chat/completions", json=body) as reply:
                reply.raise_for_status()
                said = (await reply.json())["choices"][0]["message"]["content"]
                total += len(said)
    return float(total % 3)


@dataclass
class Bench:
    """One process's worth of a run over a database that outlives it."""

    loop: Loop
    engine: LedgerEngine
    policy: LedgerPolicy
    store: Store


@asynccontextmanager
async def bench(folder: Path, agent: Any = agent, **settings: Any) -> AsyncIterator[Bench]:
    config = with_settings(
        Config(),
        {"trainer.steps": STEPS, "trainer.tasks_per_step": 2, "trainer.eval_every": 1, "runner.concurrency": 8}
        | {key.replace("__", "."): value for key, value in settings.items()},
    )
    rng = random.Random(3)
    folder.mkdir(exist_ok=True)
    async with AsyncExitStack() as resources:
        fake = await resources.enter_async_context(FakeVLLM(script=lambda body: Reply("x" * rng.randrange(1, 9))))
        store = plugins().store(f"sqlite:///{folder / 'lightning.db'}")
        await store.open()
        resources.push_async_callback(store.close)
        described = {"algorithm": describe_algorithm(ALGORITHM), "train_agents": [], "seed": 0}
        run = await store.put_run(Run("run", "run", described))
        policy, engine = LedgerPolicy(fake), LedgerEngine()
        runner = InlineRunner(agent, config.runner)
        await runner.start()
        resources.push_async_callback(runner.close)
        gateway = Gateway(store, [Upstream(fake.url, fake.model)], config.gateway, secret=b"s" * 32)
        await gateway.start()
        resources.push_async_callback(gateway.close)
        stack = Stack(run, config, folder, store, policy, gateway, runner)
        engine.open(folder, OptimizerConfig(), seed=0)
        with Trackers((), config, run="run", folder=folder, store=store) as trackers:
            loop = Loop(stack, engine, ALGORITHM, TASKS, VAL, (), Reporter(enabled=False), trackers)
            yield Bench(loop, engine, policy, store)


async def assert_finished(made: Bench) -> None:
    steps = await made.store.list_steps("run")
    assert [record.step for record in steps] == list(range(STEPS))
    assert len(made.engine.ledger) == STEPS, "each step is in the weights once"
    assert made.policy.ledger == made.engine.ledger, "the policy server has the trained weights"
    assert made.policy.version == STEPS
    report = await audit(made.store, "run")
    assert report.ok, report.findings
    assert report.rederived


async def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.loop.run({"seconds/start": 1.0})
        await assert_finished(made)
        summary = await summarize(made.store, "run")
    assert [result.step for result in summary.evaluations] == [0, 1, 2, 3]
    assert (summary.steps, summary.rollouts, summary.failed, summary.drift_tokens) == (STEPS, STEPS * 8, 0, 0)
    assert summary.time["start"] == 1.0
    assert summary.time["rollout"] > 0


@pytest.mark.parametrize("checkpoint_every", [1, 2])
@pytest.mark.parametrize(
    "where", ["step:1", "save:2", "commit:1", "committed:1", "weights:2", "update:2", "evaluate:1", "weights:3"]
)
async def test_wherever_it_is_cut_a_resume_finishes_exactly_once(
    tmp_path: Path, where: str, checkpoint_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path, trainer__checkpoint_every=checkpoint_every) as made:
        made.engine.crash_at = where
        if where.startswith("update"):
            made.policy.crash_at = 2
        _crash_in_store(made, where, monkeypatch)
        try:
            await made.loop.run({})
        except Crash:
            pass
        else:
            assert where == "save:2", "every other place is passed"
            assert checkpoint_every == 2 or not where
        committed = await made.store.list_steps("run")
    monkeypatch.undo()
    async with bench(tmp_path, trainer__checkpoint_every=checkpoint_every) as made:
        await made.loop.run({})
        await assert_finished(made)
        assert (await made.store.list_steps("run"))[: len(committed)] == committed


def _crash_in_store(made: Bench, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, _, step = where.partition(":")
    commit, evaluate = made.store.commit_step, made.loop.evaluate

    async def commit_step(record: Any) -> None:
        if kind == "commit" and record.step == int(step):
            raise Crash(where)
        await commit(record)
        if kind == "committed" and record.step == int(step):
            raise Crash(where)

    async def evaluation() -> Any:
        if kind == "evaluate" and made.loop.done == int(step):
            raise Crash(where)
        return await evaluate()

    monkeypatch.setattr(made.store, "commit_step", commit_step)
    monkeypatch.setattr(made.loop, "evaluate", evaluation)


async def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.loop.run({})
        before = await made.store.list_steps("run")
    async with bench(tmp_path) as made:
        await made.loop.run({})
        assert await made.store.list_steps("run") == before
        await assert_finished(made)


async def test_a_changed_store_cannot_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(tmp_path, trainer__checkpoint_every=3) as made:
        made.policy.crash_at = 2
        with pytest.raises(Crash):
            await made.loop.run({})
    async with bench(tmp_path, trainer__checkpoint_every=3) as made:
        honest = made.store.transitions_of

        async def tampered(attempts: Sequence[tuple[str, int]]) -> Any:
            calls = await honest(attempts)
            for call in [call for calls_of_one in calls for call in calls_of_one]:
                call.response_ids[0] += 1
            return calls

        monkeypatch.setattr(made.store, "transitions_of", tampered)
        with pytest.raises(AuditError, match="cannot be replayed"):
            await made.loop.run({})


async def test_failed_rollouts_are_counted_and_the_rest_is_trained(tmp_path: Path) -> None:
    async def sometimes(task: Task, llm: Any) -> float:
        reward = await agent(task, llm)
        if random.Random(llm.api_key).random() < 0.3:
            raise ValueError("a bad day")
        return reward

    async with bench(tmp_path, sometimes) as made:
        await made.loop.run({})
        summary = await summarize(made.store, "run")
        assert summary.steps == STEPS
        assert 0 < summary.failed < summary.rollouts
        trained = {name for record in await made.store.list_steps("run") for name, _ in record.rollouts}
        page = await made.store.list_rollouts("run", split="train")
        assert all(rollout.reward is not None for rollout in page.rollouts if rollout.id in trained)


async def test_when_every_rollout_fails_the_first_error_is_shown(tmp_path: Path) -> None:
    def broken(task: Task, llm: Any) -> float:
        raise ValueError("no such table: pens")

    async with bench(tmp_path, broken) as made:
        made.loop.val = []
        with pytest.raises(RunnerError, match=r"rollouts of step 1: all 8 failed.*no such table: pens"):
            await made.loop.run({})


async def test_a_step_that_failed_as_a_whole_is_tried_again_on_resume(tmp_path: Path) -> None:
    def broken(task: Task, llm: Any) -> float:
        raise ValueError("the database is down")

    async with bench(tmp_path, broken) as made:
        made.loop.val = []
        with pytest.raises(RunnerError):
            await made.loop.run({})
    async with bench(tmp_path) as made:
        await made.loop.run({})
        await assert_finished(made)
        summary = await summarize(made.store, "run")
    assert summary.failed == 8, "the first try is still counted"
    assert summary.rollouts == (STEPS + 1) * 8


async def test_an_evaluation_that_the_agent_failed_is_a_result_without_a_reward(tmp_path: Path) -> None:
    async def helpless(task: Task, llm: Any) -> float:
        reward = await agent(task, llm)
        if str(task.input).startswith("held out"):
            raise ValueError("too hard")
        return reward

    async with bench(tmp_path, helpless) as made:
        await made.loop.run({})
        await assert_finished(made)
        summary = await summarize(made.store, "run")
    assert [result.reward for result in summary.evaluations] == [None] * 4, "never a reward of 0"
    assert [result.failed for result in summary.evaluations] == [3] * 4


async def test_an_evaluation_lost_to_the_infrastructure_is_an_error_and_is_tried_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        made.policy.fake.default = Reply(status=500, message="out of memory")
        made.policy.fake.script = None
        with pytest.raises(RunnerError, match="held-out tasks after 0 steps: all 3 failed"):
            await made.loop.run({})
    async with bench(tmp_path) as made:
        await made.loop.run({})
        await assert_finished(made)
        summary = await summarize(made.store, "run")
    assert [result.failed for result in summary.evaluations] == [0, 0, 0, 0]
    assert [result.rollouts for result in summary.evaluations] == [3, 3, 3, 3]


@pytest.mark.parametrize("gap", [25.0, float("nan")])
async def test_a_server_that_does_not_serve_the_trained_weights_is_an_error(tmp_path: Path, gap: float) -> None:
    async with bench(tmp_path) as made:
        made.policy.gap = gap
        with pytest.raises(PolicyServerError, match="does not serve the trained weights"):
            await made.loop.run({})
    async with bench(tmp_path) as made:
        await made.loop.run({})
        await assert_finished(made)


async def test_a_server_that_dies_during_an_update_is_restarted_and_updated(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        supervisor = asyncio.create_task(made.loop.stack.supervise())
        made.loop.stack._supervisor = supervisor
        made.policy.die_at = 2
        await made.loop.run({})
        assert made.loop.stack.restarts == 1
        assert made.policy.restarted_with == 1
        await assert_finished(made)
        supervisor.cancel()


async def test_a_restart_that_fails_during_an_update_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        made.loop.stack._supervisor = asyncio.create_task(made.loop.stack.supervise())
        made.policy.die_at, made.policy.restart_fails = 2, True
        async with asyncio.timeout(60):
            with pytest.raises(PolicyServerError, match="no memory for a restart"):
                await made.loop.run({})
    async with bench(tmp_path) as made:
        await made.loop.run({})
        await assert_finished(made)


async def test_checkpoints_that_the_store_does_not_know_are_never_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-00000007"
    folder.mkdir(parents=True)
    async with bench(tmp_path) as made:
        with pytest.raises(ConfigError, match="checkpoints of a run that this store does not know"):
            await made.loop.run({})
    assert folder.is_dir()


async def test_only_the_named_agents_are_trained(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        made.loop.train_agents = ("somebody else",)
        await made.loop.run({})
        records = await made.store.list_steps("run")
        assert [record.rollouts for record in records] == [()] * STEPS
