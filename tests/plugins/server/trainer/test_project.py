"""A run of a project: its own runners find it, others do not, and its prompts and weights are the project's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import ClientSession
from lightning.config import Config, load_config, with_settings
from lightning.errors import ConfigError
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.trainer import Trainer
from lightning.trainer import stack as trainer_stack
from lightning.trainer.agents import of_project
from lightning.trainer.runs import check_run
from lightning.trainer.stack import Stack, open_stack
from lightning.types import LLM, Rollout, Run, Scope, Status, Task
from lightning_resources.nouns import Resource
from lightning_resources.operations import get_resource, list_resources, put_resource, resource_uses
from lightning_resources.prompts import resolve_prompts
from lightning_resources.weights import keep_weights
from lightning_server.auth import ALL_PROJECTS, issue_token
from lightning_server.client import Client
from lightning_server.control import RUNNER_FILE, token_file
from lightning_server.remote_runner import RemoteRunner
from lightning_server.tokens import put_token

from tests.core.trainer.test_opening import Policy

TEXTS = {"default": "Write for all.", "team-a": "Write for the team."}
CONFIG = with_settings(Config(), {"runner.concurrency": 2, "runner.lease_ttl": 5})


@dataclass
class House:
    """One database, and a trainer of each of two projects over it, whose agents are clients."""

    store: MemoryStore
    stacks: dict[str, Stack]

    async def add(self, number: int) -> None:
        """A further rollout of each run."""
        for project, stack in self.stacks.items():
            await stack.create([Rollout(f"run-{project}/{number}", f"run-{project}", Task(project), "g", index=number)])

    async def work(self, token: str, **ends: float) -> list[tuple[str, str]]:
        """What a client did with a token, at whichever trainer's port: tasks, and the prompts of their agents."""
        done: list[tuple[str, str]] = []

        async def agent(task: Task, llm: LLM) -> float:
            done.append((str(task.input), llm.prompts["writer"]))
            body = {"model": llm.model, "messages": [{"role": "user", "content": "hi"}]}
            headers = {"authorization": f"Bearer {llm.api_key}"}
            async with (
                ClientSession(headers=headers) as http,
                http.post(f"{llm.base_url}/chat/completions", json=body) as reply,
            ):
                assert reply.status == 200, await reply.text()
            return 1.0

        url = self.stacks["default"].gateway.url
        client = Client(url, agent, token=token, runner="inline", config=CONFIG, **ends)  # type: ignore[arg-type]
        await asyncio.wait_for(client.work(), 30)
        return sorted(done)


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    async with AsyncExitStack() as resources:
        fake = await resources.enter_async_context(FakeVLLM())
        store = MemoryStore()
        await store.open()
        resources.push_async_callback(store.close)
        monkeypatch.setattr(trainer_stack, "make_policy_server", lambda *_, **__: Policy(fake, store))
        stacks: dict[str, Stack] = {}
        for project, text in TEXTS.items():
            seen = of_project(store, project)
            await put_resource(seen, Resource("writer", text))
            run = await check_run(store, f"run-{project}", {}, resume=False, project=project)
            prompts = await resolve_prompts(seen, run.id, {"writer": "resource:writer"}, project=project)
            folder = tmp_path / project
            folder.mkdir()
            stacks[project] = stack = await open_stack(
                resources,
                run=run,
                config=CONFIG,
                folder=folder,
                model=folder,
                store=store,
                runner=RemoteRunner(),
                prompts=prompts,
                restores=False,
            )
            await stack.store.put_run(run)
            await stack.prompts.keep(stack.store, run.id)
            await stack.tell_how_to_call()
        yield House(store, stacks)


async def test_a_project_s_runners_find_its_run_alone_and_get_its_prompts(house: House, tmp_path: Path) -> None:
    await house.add(0)
    tokens = {
        project: token_file(house.store, tmp_path / project, RUNNER_FILE).read_text().strip() for project in TEXTS
    }
    assert await house.work(tokens["team-a"], rollouts=1) == [("team-a", TEXTS["team-a"])]
    assert await house.work(tokens["default"], idle=0.3) == [("default", TEXTS["default"])]
    assert await house.work(tokens["team-a"], idle=0.3) == []
    for project in TEXTS:
        (run,) = await house.store.list_runs(project)
        (rollout,) = (await house.store.list_rollouts(run.id)).items
        assert (run.id, rollout.error, rollout.status) == (f"run-{project}", "", Status.SUCCEEDED)


async def test_whoever_sees_all_projects_gets_the_prompts_of_each_run_s_own(house: House) -> None:
    await house.add(0)
    token, plain = issue_token(Scope.ADMIN, ALL_PROJECTS)
    await put_token(house.store, token)
    assert await house.work(plain, rollouts=2) == sorted(TEXTS.items())


@pytest.mark.parametrize("of", ["team-a", ALL_PROJECTS])
async def test_a_reference_to_a_server_means_the_project_s_own_resource(
    house: House, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, plain = issue_token(Scope.ADMIN, of)
    await put_token(house.store, token)
    monkeypatch.setenv("LIGHTNING_TOKEN", plain)
    texts = {"writer": f"resource:{house.stacks['default'].gateway.url}#writer"}
    mine = MemoryStore()
    await mine.open()
    await mine.put_run(Run("run", "run", project="team-a"))
    prompts = await resolve_prompts(of_project(mine, "team-a"), "run", texts, project="team-a")
    assert prompts.of(Rollout("r", "run", Task(1), "g")) == {"writer": TEXTS["team-a"]}
    await mine.close()


async def test_what_a_run_makes_has_the_project_s_own_names(house: House, tmp_path: Path) -> None:
    await house.add(0)
    model = tmp_path / "model"
    model.mkdir()
    for stack in house.stacks.values():
        await keep_weights(stack.store, model, {"run": stack.run.id})
    for project, prefix in (("default", ""), ("team-a", "project::team-a::")):
        names = {
            item.name
            for item in await list_resources(
                of_project(house.store, project),
            )
        }
        assert {"writer", "policy/weights"} <= names
        stored = await get_resource(house.store, f"{prefix}policy/weights")
        assert stored is not None
        assert stored.metadata == {"run": f"run-{project}"}
        (rollout,) = (await house.store.list_rollouts(f"run-{project}")).items
        assert rollout.resources == {f"{prefix}writer": 1}
        (use,) = await resource_uses(house.store, f"{prefix}writer")
        assert use.run == f"run-{project}"


async def test_a_run_stays_in_its_project(house: House) -> None:
    for of, asked in (("team-a", "default"), ("default", "team-a")):
        with pytest.raises(ConfigError, match=f"is of the project '{of}' .* --set trainer.project={of}, or give"):
            await check_run(house.store, f"run-{of}", {}, resume=True, project=asked)
    with pytest.raises(ConfigError, match="exists already"):
        await check_run(house.store, "run-default", {}, resume=False, project="team-a")
    with pytest.raises(ConfigError, match=r"it has run-team-a: give"):
        await check_run(house.store, "another", {}, resume=True, project="team-a")


@pytest.mark.parametrize("project", ["", "*", "a::b", "a" * 65, "-team"])
def test_what_no_token_could_be_bound_to_is_no_project(project: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load_config(env={"LIGHTNING_TRAINER__PROJECT": f'"{project}"'})
    with pytest.raises(ConfigError, match=r"^trainer\.project: "):
        Trainer(tmp_path, config=config)
