"""Opening: nothing but the run's policy answers its agents, also before the trainer has restored it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from lightning.asyncio_utils import one_by_one
from lightning.config import Config, with_settings
from lightning.config.sections import GatewayConfig, PolicyServerConfig
from lightning.errors import ConfigError, GatewayError, PolicyServerError
from lightning.policy_server.protocol import Probe, Update
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Store
from lightning.testing.fake_vllm import FakeVLLM
from lightning.trainer import stack as trainer_stack
from lightning.trainer import trainer as opening
from lightning.trainer.agents import HowToCall
from lightning.trainer.stack import Stack, check_ports, open_stack
from lightning.trainer.stages import StepLine
from lightning.trainer.trainer import Trainer
from lightning.types import LLM, Fault, Lease, Outcome, Rollout, Run, Status, Task

from tests.tiny_families import make_tiny_family


class Policy:
    """A policy server that has the model's own weights until it is given others."""

    models = ()

    def __init__(self, fake: FakeVLLM, store: Store) -> None:
        self.fake, self._store = fake, store
        self.version = 0
        self.url, self.model, self.alias, self.claim = fake.url, fake.model, fake.model, ""
        self.notice: Any = None
        self.died = asyncio.Event()
        self.restarted = asyncio.Event()

    async def start(self) -> None:
        self.notice = await self._store.get_state("", "policy/run")

    async def update(self, weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> Update:
        if weights is not None and weights.name == "bad":
            raise PolicyServerError("the file does not fit")
        self.version = version
        return Update(version, {})

    async def wait_died(self) -> None:
        await self.died.wait()

    async def restart(self, weights: Path | None, version: int) -> None:
        self.died.clear()
        self.restarted.set()

    async def close(self) -> None: ...


class Idle:
    """A runner that is asked for nothing."""

    concurrency = 1

    async def start(self) -> None: ...

    async def run(self, lease: Lease, llm: LLM) -> Outcome:
        raise AssertionError("nothing is leased")

    async def close(self) -> None: ...


class House:
    """A trainer that was killed, and what outlived it: an agent."""

    def __init__(self, resources: AsyncExitStack, fake: FakeVLLM, store: Store, store_url: str = "") -> None:
        self._store_url = store_url
        self._resources, self.store = resources, store
        self.fake, self.policy = fake, Policy(fake, store)

    async def lease(self) -> Lease:
        await self.store.create_rollouts([Rollout("run/7/0", "run", Task("q"), "g", step=7)])
        (lease,) = await self.store.lease("run", "client")
        return lease

    async def open(self, folder: Path, *, restores: bool, **settings: Any) -> Stack:
        run, runner = Run("run", "run"), Idle()
        return await open_stack(
            self._resources,
            run=run,
            config=with_settings(Config(), {"gateway.hold_timeout": 30, **settings}),
            folder=folder,
            model=folder,
            store=self.store,
            runner=runner,
            restores=restores,
            store_url=self._store_url,
        )

    async def versions(self) -> list[int]:
        return [call.version for call in await self.store.transitions("run/7/0")]


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    async with AsyncExitStack() as resources:
        fake = await resources.enter_async_context(FakeVLLM())
        store = MemoryStore()
        await store.open()
        resources.push_async_callback(store.close)
        await store.put_run(Run("run", "run"))
        made = House(resources, fake, store)
        monkeypatch.setattr(trainer_stack, "make_policy_server", lambda *_, **__: made.policy)
        yield made


async def ask(llm: LLM) -> int:
    body = {"model": llm.model, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {llm.api_key}"}
    async with httpx.AsyncClient(timeout=30) as http:
        return (await http.post(f"{llm.base_url}/chat/completions", json=body, headers=headers)).status_code


@pytest.mark.parametrize(("attempts", "restarts"), [(1, 5), (4, 7)])
async def test_a_rollout_that_ends_its_policy_server_each_time_ends_before_the_run(
    house: House, tmp_path: Path, attempts: int, restarts: int
) -> None:
    """It is given back `rules.EXCUSED` times, and then spends the attempts that it has."""
    await house.store.create_rollouts([Rollout("run/7/0", "run", Task("q"), "g", max_attempts=attempts)])
    stack = await house.open(tmp_path, restores=False, **{"runner.max_attempts": attempts})
    lost = Outcome(fault=Fault.INFRASTRUCTURE, error="the policy server went away")
    for number in range(1, restarts + 1):
        for lease in await house.store.lease("run", "client"):
            await house.store.complete(lease.rollout.id, lease.attempt, lost, spend=False)
        house.policy.restarted.clear()
        house.policy.died.set()
        async with asyncio.timeout(60):
            await house.policy.restarted.wait()
        assert stack.restarts == number
    ended = await house.store.get_rollout("run/7/0")
    assert ended is not None
    assert ended.status is Status.FAILED
    assert stack._supervisor is not None
    house.policy.died.set()
    with pytest.raises(PolicyServerError, match=f"died {restarts + 1} times within one step"):
        await asyncio.wait_for(asyncio.shield(stack._supervisor), 60)


async def test_deaths_before_a_step_are_no_reason_to_end_a_run(house: House, tmp_path: Path) -> None:
    """In weeks a server may die more than MAX_RESTARTS times, and one that is attached is started again by its operator."""
    stack = await house.open(tmp_path, restores=False)
    assert stack._supervisor is not None

    async def die() -> None:
        house.policy.restarted.clear()
        house.policy.died.set()
        back = asyncio.create_task(house.policy.restarted.wait())
        await asyncio.wait({back, stack._supervisor}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        back.cancel()

    limit = trainer_stack.MAX_RESTARTS
    for step in range(1, 3):
        for _ in range(limit):
            await die()
            await asyncio.wait_for(stack._serving.wait(), 60)
        await stack.update(Path("good"), step)
    assert (stack.restarts, stack._supervisor.done()) == (2 * limit, False)


# what the trainer asks for ------------------------------------------------------------------------------------------
class OpenedError(Exception):
    """The stack would have been opened."""


class Engine:
    def open(self, *_: object, **__: object) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(runner: str = "inline", **settings: Any) -> Trainer:
        (tmp_path / "config.json").write_text("{}")
        config = with_settings(Config(), {key.replace("__", "."): value for key, value in settings.items()})
        made = Trainer(tmp_path, "grpo", runner=runner, config=config, out=tmp_path / "run", progress=False)
        made._make_engine = lambda config: Engine()  # type: ignore[assignment, return-value]
        return made

    return make


@pytest.mark.parametrize(("steps", "attach", "restores"), [(0, "", False), (2, "", True), (0, "http://there:1", True)])
def test_a_run_with_steps_or_a_server_of_somebody_elses_is_restored_first(
    steps: int,
    attach: str,
    restores: bool,
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    async def open_nothing(*_: object, **options: Any) -> None:
        asked.update(options)
        raise OpenedError

    def committed(number: int) -> Any:
        return SimpleNamespace(step=number, context={})

    async def all_steps(self: Store, run: str) -> list[Any]:
        return [committed(number) for number in range(1, steps + 1)]

    async def last_step(self: Store, run: str) -> Any:
        return committed(steps) if steps else None

    made = make_trainer(**({"policy_server__attach": attach} if attach else {}))
    monkeypatch.setattr(opening, "open_stack", open_nothing)
    monkeypatch.setattr(type(made.open_store()), "steps", all_steps)
    monkeypatch.setattr(type(made.open_store()), "last_step", last_step)
    with pytest.raises(OpenedError):
        made.fit(lambda task, llm: 1.0, [{"q": 1}])
    assert asked["restores"] is restores


@pytest.mark.parametrize("dry", [True, False], ids=["dev", "fit"])
def test_clients_are_told_how_to_call_before_a_rollout_is_made(
    dry: bool, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[HowToCall] = []
    fake = FakeVLLM()

    class Own(Policy):
        def __init__(self) -> None:
            self.fake, self.version, self.died = fake, 0, asyncio.Event()

        async def start(self) -> None:
            await fake.start()
            self.url, self.model, self.alias, self.claim = fake.url, fake.model, fake.model, ""

        async def close(self) -> None:
            await fake.close()

    async def dry_run(stack: Stack, *_: object) -> None:
        told.append(await HowToCall.of_run(stack.store, stack.run.id))

    class Training:
        def __init__(self, stack: Stack, *_: object) -> None:
            self.stack = stack

        async def run(self, started: object) -> None:
            await dry_run(self.stack)
            raise OpenedError

    monkeypatch.setattr(trainer_stack, "make_policy_server", lambda *_, **__: Own())
    monkeypatch.setattr(StepLine, "rehearsal", lambda line: dry_run)
    monkeypatch.setattr(opening, "Loop", Training)
    settings: dict[str, Any] = {"trainer__eval_temperature": 0.25, "runner__prompts": {"greeter": "hello {name}"}}
    made = make_trainer("inline", **settings)
    if dry:
        made.dev(lambda task, llm: 1.0, [{"q": 1}])
    else:
        with pytest.raises(OpenedError):
            made.fit(lambda task, llm: 1.0, [{"q": 1}])
    (how,) = told
    assert how.eval_temperature == 0.25
    assert how.own == {"greeter": "hello {name}"}


@pytest.mark.parametrize("taken", ["gateway.port", "policy_server.port"])
async def test_a_taken_port_is_said_before_anything_is_started(house: House, tmp_path: Path, taken: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = {taken: other.getsockname()[1]}
        with pytest.raises((GatewayError, PolicyServerError), match=rf"in use.*{re.escape(taken)}"):
            await house.open(tmp_path, restores=False, **settings)
        assert house.policy.notice is None, "nothing was started"
        with pytest.raises(GatewayError, match=r"in use.*gateway\.port"):
            check_ports(GatewayConfig(port=other.getsockname()[1]), PolicyServerConfig())


async def test_one_by_one_begins_the_second_when_the_first_is_done() -> None:
    told: list[str] = []

    async def do(name: str, *, fails: bool = False) -> str:
        told.append(f"{name} begins")
        await asyncio.sleep(0)
        told.append(f"{name} ends")
        if fails:
            raise PolicyServerError(name)
        return name

    assert await one_by_one(do("a"), do("b")) == ("a", "b")
    assert told == ["a begins", "a ends", "b begins", "b ends"]
    with pytest.raises(PolicyServerError, match="c"):
        await one_by_one(do("c", fails=True), do("d"))
    assert told[4:] == ["c begins", "c ends"]


def test_a_folder_that_cannot_be_trained_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that can, what is carried over is said; by a run and by a dry run."""
    opened: list[Path] = []

    async def open_nothing(*_: object, model: Path, **__: object) -> None:
        opened.append(model)
        raise OpenedError

    monkeypatch.setattr(opening, "open_stack", open_nothing)
    said: list[str] = []
    monkeypatch.setattr(opening.Reporter, "say", lambda self, text: said.append(text))
    model = make_tiny_family(tmp_path / "model", "llama2")
    for start in ("fit", "dev"):
        made = Trainer(model, "grpo", runner="inline", out=tmp_path / start, progress=False)
        with pytest.raises(OpenedError):
            getattr(made, start)(lambda task, llm: 0.0, [{"q": 1}])
        assert said.pop() == f"{model}: 2 tensors are not trained and are carried over untouched: model.layers.* (2)."
    assert opened == [model, model]
    needs = [text for text in said if text.startswith("this run needs at least ")]
    assert [re.sub(r"^this run needs at least [0-9.]+ .B of (\w+).*", r"\1", text) for text in needs] == [
        "disk",
        "memory",
    ]
    rest = [text.partition(",")[0] for text in said if text not in needs]
    assert rest == ["engine.lr is 0.002"], "a run says its rate, too"
    packed = json.loads((model / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (model / "config.json").write_text(json.dumps(packed))
    for start in ("fit", "dev"):
        made = Trainer(model, "grpo", runner="inline", out=tmp_path / f"{start} 2", progress=False)
        with pytest.raises(ConfigError, match=r"quantised \(awq\)"):
            getattr(made, start)(lambda task, llm: 0.0, [{"q": 1}])
    assert opened == [model, model]


def test_a_training_that_is_interrupted_says_how_to_go_on(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(main: Any) -> None:
        main.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(opening, "run_to_end", interrupted)
    made = make_trainer()
    with pytest.raises(KeyboardInterrupt) as stopped:
        made.fit(lambda task, llm: 0.0, train=[1])
    assert stopped.value.__notes__ == [
        f"nothing that was recorded in {made.out} is lost: the same script again goes on after its last step"
    ]
