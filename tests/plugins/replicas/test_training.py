"""A training whose policy has several servers, from its settings to its record; vLLM is scripted and knows the truth."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.output import with_store
from lightning.config import config_model, with_settings
from lightning.store.places import store_in
from lightning.store.protocol import Store
from lightning.testing import vllm_replies
from lightning.testing.fake_vllm import Reply
from lightning.trainer import Trainer, stack
from lightning.types import CallStatus, Status, StepRecord, Transition

from tests.core.trainer.test_families import agent
from tests.servers.replica import Replica
from tests.tiny_families import VOCAB, make_tiny_family


@pytest.mark.parametrize(("count", "staleness"), [(2, 0), (4, 1)])
def test_a_training_with_several_servers_of_which_one_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, staleness: int
) -> None:
    monkeypatch.setattr(vllm_replies, "VOCABULARY", VOCAB)
    folder = make_tiny_family(tmp_path / "folder", "llama2")
    words, servers, truth = itertools.cycle(["yes", "no"]), list[Replica](), dict[str, list[int]]()

    def script(body: Any) -> Reply:
        if sum(server.requests for server in servers) > 12 and not servers[1].deaths:
            asyncio.get_running_loop().create_task(servers[1].kill())
        return Reply(f"{next(words)} and more", token_delay=0.005)

    def make(*_: object, **__: object) -> Replica:
        servers.append(Replica(script, load_seconds=0.05, start_seconds=0.1, truth=truth))
        return servers[-1]

    monkeypatch.setattr(stack, "make_policy_server", make)
    settings = {
        "runner.concurrency": 8,
        "runner.max_attempts": 3,
        "policy_server.replicas": count,
        "policy_server.device": "cpu",
        "trainer.max_staleness": staleness,
    }
    Trainer(
        folder,
        "grpo:group_size=4,correction.kind=none",  # the script makes logprobs up
        runner="inline",
        config=with_settings(config_model()(), settings),
        steps=4,
        tasks_per_step=4,
        out=tmp_path / "run",
        progress=False,
    ).fit(agent, ["one", "two", "three", "four"])
    records, calls, ended = asyncio.run(read(tmp_path / "run"))
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert ended == {Status.SUCCEEDED}, "no rollout was lost"
    assert (len(servers), servers[1].deaths, servers[1].starts) == (count, 1, 2)
    assert all(server.requests for server in servers)
    good = [call for call in calls if call.status is CallStatus.OK]
    assert len(good) >= 64
    for call in good:
        places = range(len(call.response_ids))
        believed = [[run.version for run in call.versions if run.start <= place][-1] for place in places]
        assert believed == truth[call.id.removeprefix("chatcmpl-")]
    last = records[-1].metrics
    assert {f"server_{number}/version" for number in range(count)} <= last.keys()
    assert sum(last.get(f"server_{number}/requests", 0.0) for number in range(count)) > 0


async def read(run: Path, name: str = "run") -> tuple[list[StepRecord], list[Transition], set[Status]]:
    async def found(store: Store) -> tuple[list[StepRecord], list[Transition], set[Status]]:
        rollouts = (await store.list_rollouts(name, limit=1000)).items
        calls = [call for rollout in rollouts for call in await store.transitions(rollout.id)]
        return list(await store.steps(name)), calls, {rollout.status for rollout in rollouts}

    return await with_store(store_in(run), found)
