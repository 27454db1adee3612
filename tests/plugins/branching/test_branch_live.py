"""`lightning branch --live`: the policy that the trainer of the run serves answers, in the version that answered the parent."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.config import Config, with_settings
from lightning.errors import ConfigError
from lightning.gateway.upstream import Upstream
from lightning.policy_server.protocol import Update
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Store
from lightning.testing import FakeVLLM, Reply
from lightning.trainer.runs import claim_folder
from lightning.types import Rollout
from lightning_branching.branching import BranchReport, branch
from lightning_branching.live_policy import why_not_served
from lightning_server.fleet.owner import Owner

from tests.plugins.debug.evaluating import ScriptedVLLM, said
from tests.plugins.debug.evaluating import vllm as vllm

from .test_branch import INLINE, calls_of, in_store, recorded, run_of, words
from .test_branch import runs as runs

STREAMING = """
import httpx

def read(llm, content, leaves=False):
    body = {"model": llm.model, "messages": [{"role": "user", "content": content}], "stream": True}
    headers = {"authorization": f"Bearer {llm.api_key}"}
    text = ""
    with httpx.stream("POST", f"{llm.base_url}/chat/completions", json=body, headers=headers, timeout=60) as reply:
        for line in reply.iter_lines():
            text += line
            if leaves and "said" in line:
                return text
    return text

def agent(task, llm, leaves=False):
    read(llm, "one")
    return 0.5 if "said" in read(llm, "two", leaves) else 0.25

def leaving(task, llm):
    return agent(task, llm, leaves=True)
"""


class Trainer:
    """What the trainer of the run `first` says and serves: an owner before a vLLM that says one number after another."""

    def __init__(self, store: Store, vllm: FakeVLLM) -> None:
        self.store, self.owner, self.vllm = store, Owner(store, "first"), vllm
        self.updates: list[asyncio.Task[None]] = []

    def update_at(self, request: int, more: str = "", **answer: Any) -> None:
        """New weights while this request is answered, before its first token. Answers go on with `more`."""

        def script(body: Any) -> Reply:
            if len(self.vllm.requests) == request:
                self.vllm.pause()
                self.updates.append(asyncio.ensure_future(self.update(1)))
            return Reply(f"said {len(self.vllm.requests)}{more}", **answer)

        self.vllm.script = script

    async def update(self, version: int) -> None:
        """New weights, once every gateway waits; the server samples nothing meanwhile."""
        async with self.owner.hold() as hold:
            hold.update = Update(version, self.vllm.in_flight())
        self.vllm.resume()


@asynccontextmanager
async def trained(store: Store, version: int = 0) -> AsyncIterator[Trainer]:
    """The policy of the run `first` is served in this version."""
    async with FakeVLLM(script=lambda body: Reply(f"said {len(server.requests)}")) as server:
        with claim_folder(Path("runs/first")):
            trainer = Trainer(store, server)
            await trainer.owner.open([Upstream(server.url, server.model)], version)
            yield trainer
            await asyncio.gather(*trainer.updates)
            await trainer.owner.close()


def while_trained(use: Callable[[Trainer], Awaitable[Any]], version: int = 0) -> Any:
    """What `use` returns meanwhile."""

    async def run(store: Store) -> Any:
        async with trained(store, version) as trainer:
            return await use(trainer)

    return in_store(run)


async def branched(**more: Any) -> BranchReport:
    return await asyncio.to_thread(branch, "first/0/0/0", "wandering:agent", runner="inline", live=True, **more)


def test_the_policy_that_is_trained_answers_and_no_vllm_is_started(runs: ScriptedVLLM) -> None:
    parent = recorded()
    started, theirs = len(runs.servers), calls_of(parent)

    async def use(trainer: Trainer) -> tuple[BranchReport, int]:
        return await branched(at=2, n=4), len(trainer.vllm.requests)

    report, sampled = while_trained(use)
    assert report.valid == 4, report
    assert sampled == 8
    assert len(runs.servers) == started
    assert report.model == "first@0 of the policy that its trainer serves"
    said_of_it = {"rollout": parent, "attempt": 1, "at": 2, "weights": "first@0", "live": 0}
    assert run_of(report.run).config["branch"] == said_of_it
    for each in report.branches:
        own = calls_of(each.id)
        assert list(own[0].prompt_ids) == list(theirs[1].prompt_ids)
        assert {run.version for call in own for run in call.versions} == {0}
    assert calls_of(parent) == theirs
    assert not in_store(lambda store: store.list_rollouts("first", split="branch")).items


def test_an_update_meanwhile_makes_branches_void(runs: ScriptedVLLM) -> None:
    recorded()

    async def use(trainer: Trainer) -> BranchReport:
        trainer.update_at(3)
        return await branched(at=2, n=4, settings={"runner.concurrency": 1})

    report = while_trained(use)
    assert [each.state for each in report.branches] == ["valid", "void", "void", "void"]
    assert "version 1 of the policy has answered, and version 0 was to" in report.branches[-1].why
    assert report.mean == report.branches[0].reward
    rollout: Rollout = in_store(lambda store: store.get_rollout(report.branches[-1].id))
    assert (rollout.reward, rollout.attempt) == (None, 1)


@pytest.mark.parametrize("agent", ["agent", "leaving"])
def test_an_agent_reads_nothing_that_another_version_has_said(runs: ScriptedVLLM, agent: str) -> None:
    """Not of a stream either, of which it may leave the rest."""
    Path("streaming.py").write_text(STREAMING)
    recorded(f"streaming:{agent}")

    async def use(trainer: Trainer) -> BranchReport:
        trainer.update_at(2, " and more" * 40, token_delay=0.02)
        return await asyncio.to_thread(
            branch, "first/0/0/0", f"streaming:{agent}", at=1, n=1, runner="inline", live=True
        )

    (only,) = while_trained(use).branches
    assert only.state == "void", only
    assert "version 1 of the policy has answered, and version 0 was to" in only.why


async def half_answered(trainer: Trainer) -> asyncio.Task[BranchReport]:
    """A branch whose one call has been answered with two of its tokens."""
    trainer.vllm.default, trainer.vllm.script = Reply("one two three four", token_delay=0.2), None
    branching = asyncio.create_task(branched(at=3, n=1))
    async with asyncio.timeout(30):
        while sum(trainer.vllm.in_flight().values()) < 2:
            await asyncio.sleep(0.02)
    return branching


def test_an_answer_of_two_versions_is_none(runs: ScriptedVLLM) -> None:
    recorded()

    async def use(trainer: Trainer) -> BranchReport:
        branching = await half_answered(trainer)
        trainer.vllm.pause()
        await trainer.update(1)
        return await branching

    (only,) = while_trained(use).branches
    assert only.state == "void", only
    assert "version 1 of the policy has answered" in only.why


def test_a_call_that_nobody_knows_the_version_of_makes_a_branch_void(runs: ScriptedVLLM) -> None:
    recorded()

    async def use(trainer: Trainer) -> BranchReport:
        branching = await half_answered(trainer)
        taken_over = Owner(trainer.store, "first")
        await taken_over.open([Upstream(trainer.vllm.url, trainer.vllm.model)], 0)
        return await branching

    (only,) = while_trained(use).branches
    assert only.state == "void", only
    assert "nobody knows whether version 0 of the policy has answered" in only.why


def test_a_copy_of_a_database_says_what_was_once_served(runs: ScriptedVLLM) -> None:
    recorded()

    async def use(trainer: Trainer) -> None:
        shutil.copytree("runs/first", "copied/first")
        with pytest.raises(ConfigError, match=r"no process trains or serves the run in .*/copied/first now"):
            await branched(at=2, runs="copied")

    while_trained(use)


def test_an_edited_last_answer_is_known_to_have_been_given(runs: ScriptedVLLM) -> None:
    """Its agent makes no call of its own, so that only the run's state says that it began as its parent."""
    recorded()

    async def use(trainer: Trainer) -> tuple[BranchReport, int]:
        return await branched(at=3, n=2, edit="I say 0.25"), len(trainer.vllm.requests)

    report, sampled = while_trained(use)
    assert [each.reward for each in report.branches] == [0.25, 0.25], report
    assert sampled == 0


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (1, "the policy of run first has version 1 now, not version 0: leave --live out"),
        (-1, "nobody serves the policy of run first now"),
    ],
)
def test_another_version_is_refused_before_anything_runs(
    runs: ScriptedVLLM, capsys: Any, version: int, told: str
) -> None:
    parent = recorded()
    capsys.readouterr()

    async def use(trainer: Trainer) -> int:
        return await asyncio.to_thread(
            said, ["branch", parent, "wandering:agent", "--at", "2", "--live", "--yes", *INLINE]
        )

    assert while_trained(use, version) == 2
    assert told in words(capsys.readouterr().err)
    assert run_of("first.0.0.0-call2") is None


def test_a_trainer_that_was_killed_has_not_said_so(runs: ScriptedVLLM) -> None:
    recorded()

    async def use(trainer: Trainer) -> None:
        await trainer.vllm.close()
        with pytest.raises(ConfigError, match="no server of the policy of run first answers"):
            await branched(at=2)

    while_trained(use)
    assert run_of("first.0.0.0-call2") is None


def test_weights_have_their_own_vllm(runs: ScriptedVLLM) -> None:
    recorded()
    with pytest.raises(ConfigError, match="--weights and --live"):
        branch("first/0/0/0", "wandering:agent", at=2, weights="other", live=True)


def test_settings_of_a_vllm_that_is_not_started_are_named(runs: ScriptedVLLM) -> None:
    recorded()

    async def use(trainer: Trainer) -> BranchReport:
        return await branched(at=3, n=1, settings={"policy_server.max_model_len": 99})

    told = " ".join(while_trained(use).warnings)
    assert "policy_server.max_model_len: branches do not use this setting" in told


def test_the_command_says_it_as_json(runs: ScriptedVLLM, capsys: Any) -> None:
    parent = recorded()
    capsys.readouterr()
    command = ["branch", parent, "wandering:agent", "--at", "3", "-n", "2", "--live", *INLINE, "--json"]

    async def use(trainer: Trainer) -> int:
        return await asyncio.to_thread(said, command)

    assert while_trained(use) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["state"] for each in found["report"]["branches"]] == ["valid", "valid"]


async def test_a_vllm_that_sleeps_while_the_trainer_computes_is_left_alone() -> None:
    store = MemoryStore()
    await store.open()
    config = with_settings(Config(), {"policy_server.device": "cuda"})
    assert "gives its GPU to the trainer" in await why_not_served(store, "first", 0, config)
    assert await why_not_served(store, "first", 0, Config()) == "nobody serves the policy of run first now"
    await store.close()
