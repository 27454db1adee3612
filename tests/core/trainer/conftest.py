"""What the tests of the loop share: a run with a scripted policy server, over a database that outlives its processes."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import numpy as np
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Algorithm
from lightning.batch.sample import FloatArray, Sample, span_digest
from lightning.config import Config, with_settings
from lightning.engines.protocol import OptimizerConfig, StepResult
from lightning.errors import PolicyServerError
from lightning.gateway import Gateway, Upstream
from lightning.losses.protocol import Loss
from lightning.plugins import plugins
from lightning.policy_server.protocol import Probe, Update, Usage
from lightning.policy_server.weights import WeightsFolder
from lightning.runner.inline import InlineRunner
from lightning.store.protocol import Store
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.tracking.trackers import Trackers
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.context import keep_epochs
from lightning.trainer.loop import Loop
from lightning.trainer.model import optimizer_of
from lightning.trainer.run_stages import RunLine, Start, run_line
from lightning.trainer.runs import check_run, describe_algorithm, name_folder
from lightning.trainer.samplers import RECORDED, Asked, Sampler, sampler_of
from lightning.trainer.stack import Stack
from lightning.trainer.stages import StepLine
from lightning.trainer.summary import Reporter
from lightning.trainer.trainer import prepare
from lightning.types import Json, Task, token_ids
from safetensors.numpy import load_file, save_file

from tests.servers.memory import memory_store as store  # noqa: F401 — a fixture

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
    valued: int = 0
    losses: list[Loss] = field(default_factory=list)
    gradient: str = ""
    fail_next: Exception | None = None
    """What the next gradient fails with."""
    lr: float = 0.0
    idle: bool = False
    """Whether steps teach nothing."""
    did: list[str] = field(default_factory=list)
    """What was asked of it, in order."""

    def open(self, model: Path, optimizer: OptimizerConfig, *, seed: int, head: object = None) -> None:
        self.ledger, self.lr = [], optimizer.lr

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        return [np.zeros(len(sample), dtype=np.float32) for sample in samples]

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """What a critic says that changes with every step."""
        self.valued += 1
        return [np.array([len(self.ledger) + span.start % 7 / 8 for span in row.spans], np.float32) for row in samples]

    def step(self, samples: Sequence[Sample], loss: Loss, lr: float | None = None) -> StepResult:
        self._point(f"step:{len(self.ledger)}")
        text, found = self._looked_at(samples, loss, self.lr if lr is None else lr)
        if self.idle or not samples:
            return StepResult(found.metrics | {"stepped": 0.0}, found.seen)
        self.ledger.append(text)
        return StepResult(found.metrics | {"stepped": 1.0}, found.seen)

    def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        if self.fail_next is not None:
            error, self.fail_next, self.gradient = self.fail_next, None, ""
            raise error
        text, found = self._looked_at(samples, loss, 0.0)
        self.gradient += text
        return StepResult(found.metrics | {"stepped": 0.0, "updates": 0.0}, found.seen)

    def optim_step(self, lr: float | None = None) -> StepResult:
        self._point(f"update:{len(self.ledger)}")
        rate = self.lr if lr is None else lr
        self.ledger.append(f"{rate}:{self.gradient}")
        self.gradient = ""
        return StepResult({"stepped": 1.0, "updates": 1.0, "grad_norm": 1.0, "lr": rate}, {})

    def _looked_at(self, samples: Sequence[Sample], loss: Loss, lr: float) -> tuple[str, StepResult]:
        """A digest of rows, and what is reported of them."""
        self.losses.append(loss)
        text = hashlib.sha256(str(lr).encode())
        seen = {}
        for sample in samples:
            text.update(sample.ids.tobytes() + sample.advantages.tobytes())
            for span in sample.spans:
                ids, lps = sample.ids[span.start : span.stop], sample.logprobs[span.start : span.stop]
                seen[span.rollout, span.attempt, span.seq] = span_digest(token_ids(ids.tolist()), lps.tolist())
        metrics = {"loss": 0.0, "max_logprob_gap": 0.0, "tokens": float(sum(map(len, samples)))}
        return text.hexdigest(), StepResult(metrics, seen)

    def save(self, folder: Path) -> None:
        self.did.append(f"save:{folder.name}")
        self._point(f"save:{len(self.ledger)}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ledger.json").write_text(json.dumps(self.ledger))

    def load(self, folder: Path) -> None:
        self.ledger = json.loads((folder / "ledger.json").read_text())

    def export(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def weights(self, file: Path) -> Path:
        self.did.append(f"weights:{file.stem}")
        self._point(f"weights:{len(self.ledger)}")
        save_file({"ledger": np.frombuffer(json.dumps(self.ledger).encode(), np.uint8)}, file)
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

    alias, models, claim = model, (), ""
    used = Usage()

    async def start(self) -> None: ...

    async def usage(self) -> Usage:
        return self.used

    async def update(self, weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> Update:
        if version == self.crash_at:
            raise Crash(f"update:{version}")
        if version == self.die_at:
            self.die_at = -1
            self.died.set()
            raise PolicyServerError("the connection was reset")
        self.fake.pause()
        in_flight = self.fake.in_flight()
        if weights is not None:
            self.ledger = json.loads(bytes(load_file(weights)["ledger"]))
        self.version = version
        self.fake.resume()
        served = [[ours + self.gap for ours in probe.logprobs[1:]] for probe in probes]
        return Update(version, in_flight, served=served)

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
    Crash: ClassVar[type[BaseException]] = Crash


@asynccontextmanager
async def open_bench(
    folder: Path,
    agent: Any = agent,
    *,
    algorithm: Algorithm | AlgorithmSchedule = ALGORITHM,
    parent: str | None = None,
    script: Callable[[Any], Reply] | None = None,
    sampler: Sampler | None = None,
    record: Json = None,
    train: Sequence[Task] = TASKS,
    own_loop: bool = False,
    stages: Callable[[Config], StepLine] = lambda config: StepLine(),
    run_stages: Callable[[Config], RunLine] = run_line,
    **settings: Any,
) -> AsyncIterator[Bench]:
    config = with_settings(
        Config(),
        {"trainer.steps": STEPS, "trainer.tasks_per_step": 2, "trainer.eval_every": 1, "runner.concurrency": 8}
        | {key.replace("__", "."): value for key, value in settings.items()},
    )
    rng = random.Random(3)
    folder.mkdir(exist_ok=True)
    async with AsyncExitStack() as resources:
        fake = await resources.enter_async_context(
            FakeVLLM(script=script or (lambda body: Reply("x" * rng.randrange(1, 9))))
        )
        store = plugins().store(f"sqlite:///{folder / 'lightning.db'}")
        await store.open()
        resources.push_async_callback(store.close)
        schedule = algorithm if isinstance(algorithm, AlgorithmSchedule) else AlgorithmSchedule.of(algorithm)
        described: dict[str, Json] = {
            "algorithm": describe_algorithm(schedule.at(1)),
            "model": "m",
            "head": "",
            "train_agents": [],
            "seed": 0,
            "config": config.model_dump(mode="json"),
            **({} if record is None else {RECORDED: record}),
        }
        line = run_stages(config)
        name = folder.name if parent else "run"
        run = await check_run(store, name, described, resume=True)
        start = Start(
            store,
            run,
            described,
            folder,
            folder,
            schedule.phases,
            config,
            lambda config: LedgerEngine(),
            "",
            Reporter(enabled=False),
            config.runner.concurrency,
        )
        line.check(config)
        start, epochs, bring_forward = await prepare(start, line, parent)
        run = start.run
        await store.put_run(run)
        await keep_epochs(store, run, epochs)
        name_folder(folder, run.id)
        policy, engine = LedgerPolicy(fake), LedgerEngine()
        runner = InlineRunner(agent, config.runner)
        await runner.start()
        resources.push_async_callback(runner.close)
        gateway = Gateway(store, [Upstream(fake.url, fake.model)], config.gateway, secret=b"s" * 32, run=run.id)
        await gateway.start()
        resources.push_async_callback(gateway.close)
        weights_folder = WeightsFolder(config.policy_server, [folder], folder)
        resources.callback(weights_folder.close)
        stack = Stack(run, config, folder, store, [policy], gateway, runner, weights_folder)
        await stack.owner.open(stack.upstreams(), 0)
        resources.push_async_callback(stack.owner.close)
        engine.open(folder, optimizer_of(config), seed=0)
        with Trackers((), config, run=run.id, folder=folder, store=store) as trackers:
            reporter = Reporter(enabled=False)
            sampler = sampler or sampler_of(Asked(Config() if own_loop else config, schedule))
            loop = Loop(
                stack,
                engine,
                schedule,
                [] if own_loop else train,
                VAL,
                (),
                reporter,
                trackers,
                epochs,
                "the base",
                sampler,
                bring_forward=bring_forward,
            )
            loop.stages = stages(config)
            yield Bench(loop, engine, policy, store)


@pytest.fixture
def bench() -> Callable[..., AbstractAsyncContextManager[Bench]]:
    """`bench(folder, agent, algorithm=..., script=..., trainer__steps=...)`: one process of a run, without plugins' stages."""
    return functools.partial(open_bench, run_stages=lambda config: RunLine())


@pytest.fixture
def answering() -> Any:
    """An agent that calls the model twice; its reward depends on what was said."""
    return agent
