"""Lightning Client: work arrives over HTTP, agents outlive servers, nothing is lost and nothing is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import lightning
import pytest
from lightning.config import with_settings
from lightning.errors import ConfigError, DataError, StoreError, UnavailableError
from lightning.gateway import Upstream
from lightning.instrument import emit
from lightning.runner.attempt_completion import NEVER_CALLED, OUTLIVED
from lightning.trainer.agents import HowToCall
from lightning.trainer.context import mark_over
from lightning.types import LLM, Fault, Outcome, Rollout, Run, Scope, Status, Task, ToolEvent
from lightning_resources.nouns import Resource
from lightning_resources.operations import put_resource
from lightning_server.auth import issue_token
from lightning_server.client import AttemptCounts, Client
from lightning_server.client import run_discovery as finding
from lightning_server.client.client import seconds_left
from lightning_server.fleet.owner import Owner
from lightning_server.http_store.transport import TokenRefusedError, TooLongError
from lightning_server.tokens import list_tokens, put_token, revoke_token

from tests.plugins.server.client.conftest import RUN, Site, calling


async def ended(site: Site, run: str = RUN) -> None:
    """Return when every rollout of a run has ended."""
    async with site.store.watch(run) as watch:
        while any(one.status in (Status.PENDING, Status.RUNNING) for one in (await site.rollouts(run)).values()):
            await watch.wait(1)


async def work_until(client: Client, *events: Coroutine[object, object, None]) -> AttemptCounts:
    """Let a client work until all of this has happened, or it has ended by itself."""
    stop = asyncio.Event()
    working = asyncio.create_task(client.work(stop))
    happening = asyncio.gather(*events)
    await asyncio.wait([working, happening], timeout=60, return_when=asyncio.FIRST_COMPLETED)
    happening.cancel()
    stop.set()
    return await working


async def test_it_finds_runs_with_work_and_does_all_of_it(site: Site) -> None:
    async def agent(task: Task, llm: LLM) -> dict[str, float]:
        value = await calling(task, llm)
        lightning.reward(0.5)
        return {"reward": value, "format": 1.0}

    server = await site.start()
    await site.begin(count=6)
    await site.begin("run-2", count=2)
    tally = await site.client(server, agent=agent, rollouts=8).work()
    assert (tally.leased, tally.succeeded, tally.lost) == (8, 8, 0)
    for run, count in ((RUN, 6), ("run-2", 2)):
        found = await site.rollouts(run)
        assert {name: one.reward for name, one in found.items()} == {f"{run}/{n}": float(n) for n in range(count)}
    assert (await site.rollouts())[f"{RUN}/3"].rewards == {"reward": 3.0, "format": 1.0}
    assert [step.value for step in list((await site.store.attempts_of([(f"{RUN}/3", None)]))[0].step_rewards)] == [0.5]
    assert len(await site.store.transitions(f"{RUN}/3")) == 1


async def test_work_that_comes_later_is_done_at_once_and_a_run_may_be_chosen(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lightning_server.client.run_discovery.FIND_SECONDS", "lightning.runner.lease_loop.LOOK_SECONDS"):
        monkeypatch.setattr(name, 300.0)  # only news brings it to lease again
    server = await site.start()
    await site.begin(count=1)
    await site.begin("run-2", count=1)
    stop = asyncio.Event()
    working = asyncio.create_task(site.client(server, runs=[RUN]).work(stop))
    await ended(site)
    await site.store.create_rollouts([lightning.Rollout("late", RUN, Task(7), "g")])
    await asyncio.wait_for(ended(site), 60)
    stop.set()
    tally = await working
    assert tally.succeeded == 2
    assert [one.status for one in (await site.rollouts("run-2")).values()] == [Status.PENDING]


async def test_the_server_judges_what_the_agent_says(site: Site) -> None:
    server = await site.start()
    await site.begin(count=1)
    tally = await site.client(server, agent=lambda task, llm: 1.0, rollouts=1).work()
    (found,) = (await site.rollouts()).values()
    assert (found.status, found.fault, found.error) == (Status.FAILED, Fault.AGENT, NEVER_CALLED)
    assert tally.failed == 1


async def test_an_agent_whose_key_expires_under_it_has_no_reward_and_is_run_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(task: Task, llm: LLM) -> float:
        if (await site.rollouts())[f"{RUN}/0"].attempt == 1:
            await asyncio.sleep(2.1)  # longer than its key is good
            with pytest.raises(aiohttp.ClientResponseError, match="401"):
                await calling(task, llm)
            return 0.0
        return await calling(task, llm)

    site.config = with_settings(site.config, {"gateway.token_ttl": 2.0})
    server = await site.start()
    await site.begin(count=1, max_attempts=9)
    told: list[str] = []
    complete = site.store.complete

    async def completing(rollout: str, attempt: int, outcome: Outcome, **how: Any) -> Rollout:
        told.append(outcome.error)
        return await complete(rollout, attempt, outcome, **how)

    site.store.complete = completing  # type: ignore[method-assign]
    tally = await work_until(site.client(server, agent=agent), ended(site))
    assert tally.retried >= 1  # more on a machine that was away for two seconds
    assert tally.succeeded == 1
    assert told[0] == OUTLIVED
    assert caplog.text.count("runner.timeout is 60 s and the server at") == 1
    assert "Raise gateway.token_ttl of the server" in caplog.text


async def test_an_agent_whose_grading_alone_outlasts_its_key_keeps_its_reward(site: Site) -> None:
    """Whatever time the runner says: the store has no call that was refused for it."""

    async def agent(task: Task, llm: LLM) -> float:
        reward = await calling(task, llm)
        while seconds_left(llm.api_key) > -0.5:  # so that its seconds are more than those of the key, too
            await asyncio.sleep(0.05)
        return reward

    site.config = with_settings(site.config, {"gateway.token_ttl": 2.0})
    server = await site.start()
    await site.begin(count=1, max_attempts=3)
    await work_until(site.client(server, agent=agent), ended(site))
    (found,) = (await site.rollouts()).values()
    assert (found.status, found.reward) == (Status.SUCCEEDED, 0.0)


async def test_keys_that_outlive_every_agent_are_no_warning(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.config = with_settings(site.config, {"gateway.token_ttl": 60})  # as long as runner.timeout
    server = await site.start()
    await site.begin(count=1)
    assert (await site.client(server, rollouts=1).work()).succeeded == 1
    assert "runner.timeout" not in caplog.text


async def test_agents_get_the_run_s_prompts_and_the_temperature_of_evaluations(site: Site) -> None:
    prompts: dict[str, Any] = {}

    async def agent(task: Task, llm: LLM) -> float:
        prompts[str(task.input)] = dict(llm.prompts)
        return await calling(task, llm)

    server = await site.start()
    await site.begin(count=1, resources={"writer": 2})
    for text in ("first", "second"):
        await put_resource(site.store, Resource("writer", text))
    await HowToCall({"critic": "be strict"}, {"write": "writer"}, {"writer": 1}, 0.25).keep(site.store, RUN)
    await site.store.create_rollouts([lightning.Rollout("evaluated", RUN, Task(8), "g", split="val")])
    await site.client(server, agent=agent, rollouts=2).work()
    assert prompts == {
        "0": {"critic": "be strict", "write": "second"},
        "8": {"critic": "be strict", "write": "first"},
    }
    asked = {one.body["messages"][0]["content"]: one.body.get("temperature") for one in site.fake.requests}
    assert asked == {"0": None, "8": 0.25}


async def test_an_agent_whose_server_ends_is_not_at_fault_and_another_server_takes_over(site: Site) -> None:
    first, second = await site.start(), await site.start()
    begun: list[str] = []

    async def agent(task: Task, llm: LLM) -> float:
        begun.append(llm.base_url)
        if len(begun) == 1:
            await (first if llm.base_url.startswith(first.url) else second).wire.cut()
        return await calling(task, llm)

    await site.begin(count=1, max_attempts=2)
    tally = await site.client(first, second, agent=agent, rollouts=2).work()
    (found,) = (await site.rollouts()).values()
    assert (found.status, found.attempt) == (Status.SUCCEEDED, 2)
    assert (tally.retried, tally.succeeded) == (1, 1)
    assert {first.url, second.url} == {url.removesuffix("/v1") for url in begun}


async def test_agents_go_on_while_no_server_answers(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    server = await site.start()

    async def agent(task: Task, llm: LLM) -> float:
        value = await calling(task, llm)
        await server.wire.cut()
        asyncio.get_running_loop().call_later(0.3, lambda: asyncio.ensure_future(server.wire.mend()))
        return value + 1

    await site.begin(count=1)
    tally = await site.client(server, agent=agent, rollouts=1).work()
    (found,) = (await site.rollouts()).values()
    assert (found.status, found.reward, found.attempt, tally.succeeded) == (Status.SUCCEEDED, 1.0, 1, 1)


async def test_a_client_may_be_started_before_its_server(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightning_server.client.client.STARTING_PAUSE", 0.05)
    server = await site.start()
    await server.wire.cut()
    await site.begin(count=1)
    client = site.client(server, rollouts=1)
    client._store._patience = 0.1
    working = asyncio.create_task(client.work())
    while "Waiting for one" not in caplog.text:
        await asyncio.sleep(0.05)
    await server.wire.mend()
    assert (await working).succeeded == 1


@pytest.mark.parametrize("drain", [30.0, 0.2])
async def test_told_to_end_it_leases_no_more_and_its_agents_may_finish(site: Site, drain: float) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def agent(task: Task, llm: LLM) -> float:
        begun.set()
        await go.wait()
        return await calling(task, llm)

    server = await site.start()
    await site.begin(count=2, max_attempts=1)
    stop = asyncio.Event()
    working = asyncio.create_task(
        site.client(server, agent=agent, runner__concurrency=1, runner__drain=drain).work(stop)
    )
    await begun.wait()
    stop.set()
    if drain > 1:
        await asyncio.sleep(0.1)
        go.set()
    tally = await working
    finished, left = (await site.rollouts()).values()
    assert left.status is Status.PENDING
    assert (tally.leased, tally.succeeded) == (1, int(drain > 1))
    assert finished.status is (Status.SUCCEEDED if drain > 1 else Status.PENDING), "given back, its attempt not spent"


async def test_it_ends_when_there_has_been_no_work_for_a_while(site: Site) -> None:
    server = await site.start()
    await site.begin()
    assert (await site.client(server, idle=0.1).work()).leased == 0


async def test_a_token_of_another_scope_is_refused_in_words(site: Site) -> None:
    server = await site.start()
    await site.begin(count=1)
    with pytest.raises(StoreError, match="scope 'viewer'; this needs runner"):
        await site.client(server, token=site.tokens[Scope.VIEWER]).work()
    with pytest.raises(StoreError, match="not one of this server"):
        await site.client(server, token="lt_" + "0" * 16 + "_" + "A" * 43).work()
    assert [one.attempt for one in (await site.rollouts()).values()] == [0]


def test_impossible_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_server.client import Client

    with pytest.raises(ConfigError, match="rollouts=0"):
        Client("http://127.0.0.1:1", calling, token="lt_x", rollouts=0)
    with pytest.raises(ConfigError, match="'remote' runs no agents itself"):
        Client("http://127.0.0.1:1", calling, token="lt_x", runner="remote")
    monkeypatch.delenv("LIGHTNING_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="LIGHTNING_TOKEN"):
        Client("http://127.0.0.1:1", calling)


async def test_while_the_run_s_policy_server_is_gone_nothing_is_leased(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning.runner.lease_loop.LOOK_SECONDS", 0.05)
    server = await site.start()
    await site.begin(count=2, max_attempts=1)
    await site.fake.close()  # as when the trainer was killed: its word of where the policy server is stays
    tally = await site.client(server, idle=0.3).work()
    assert (tally.leased, {one.attempt for one in (await site.rollouts()).values()}) == (0, {0})
    await site.fake.start()
    server.gateway._policies.of(RUN).pool.check_every = 0.05
    await Owner(site.store, RUN).open([Upstream(site.fake.url, site.fake.model)], 0)
    assert (await site.client(server, rollouts=2).work()).succeeded == 2


async def test_a_token_that_is_revoked_ends_an_idle_client(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "FIND_SECONDS", 0.05)
    monkeypatch.setattr("lightning.runner.lease_loop.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("lightning_server.auth.CACHE_SECONDS", 0.05)
    server = await site.start()
    working = asyncio.create_task(site.client(server).work())
    await asyncio.sleep(0.2)
    token = next(one for one in await list_tokens(site.store) if one.scope is Scope.RUNNER)
    await revoke_token(site.store, token.id)
    with pytest.raises(StoreError, match="revoked"):
        await asyncio.wait_for(working, 60)


async def test_a_token_that_expires_and_is_renewed_in_its_file_ends_no_agent(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_server.auth.CACHE_SECONDS", 0.0)
    file = tmp_path / "token"
    file.write_text(site.tokens[Scope.RUNNER])

    async def agent(task: Task, llm: LLM) -> float:
        token, plain = issue_token(Scope.RUNNER)
        await put_token(site.store, token)
        await asyncio.to_thread(file.write_text, plain)
        for one in await list_tokens(site.store):
            if one.scope is Scope.RUNNER and one.id != token.id:
                await revoke_token(site.store, one.id)
        return await calling(task, llm)

    server = await site.start()
    await site.begin(count=2, max_attempts=1)
    tally = await asyncio.wait_for(
        site.client(server, agent=agent, token=file, rollouts=2, runner__concurrency=1).work(), 60
    )
    assert (tally.succeeded, tally.lost) == (2, 0)


async def test_work_of_an_old_run_is_found_behind_many_newer_ones(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FIND_SECONDS", 0.05), ("NEWEST", 2), ("OLDER", 2)):
        monkeypatch.setattr(finding, name, value)
    monkeypatch.setattr("lightning.runner.lease_loop.LOOK_SECONDS", 0.2)
    server = await site.start()
    await site.begin(count=1)
    for number in range(7):
        await site.store.put_run(Run(f"newer-{number}", "x", {"tasks": ["a"]}, created_at=4e9 + number))
    client, looked_at = site.client(server, rollouts=1), list[Run]()
    listed = client._store.list_runs

    async def listing(*of: Any, **how: Any) -> list[Run]:
        found = await listed(*of, **how)
        looked_at.extend(found)
        return found

    monkeypatch.setattr(client._store, "list_runs", listing)
    assert (await asyncio.wait_for(client.work(), 60)).succeeded == 1
    assert len(looked_at) > 7
    assert not any(run.config for run in looked_at)  # they may be long, and are asked for every few seconds


async def test_one_rollout_whose_prompt_is_missing_costs_no_other(site: Site) -> None:
    server = await site.start()
    await site.begin(count=1, max_attempts=1)
    await HowToCall(bound={"writer": "prompt"}).keep(site.store, RUN)
    bad = Rollout("bad", RUN, Task(1), "group", max_attempts=1, resources={"prompt": 7})
    await site.store.create_rollouts([bad])
    assert (await work_until(site.client(server), ended(site))).succeeded == 1
    found = (await site.rollouts())["bad"]
    assert (found.status, found.fault) == (Status.FAILED, Fault.INFRASTRUCTURE)
    assert "version 7 of the prompt 'prompt'" in found.error


async def test_a_run_that_servers_refuse_is_left_alone_and_another_one_served(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = await site.start()
    await site.begin(count=1)
    await site.begin("run-2", count=1)
    lease = site.store.lease

    async def refusing(run: str, worker: str, **asked: Any) -> Any:
        if run == RUN:
            raise StoreError("this run is broken")
        return await lease(run, worker, **asked)

    monkeypatch.setattr(site.store, "lease", refusing)

    async def told() -> None:
        while f"nothing is leased from run {RUN}" not in caplog.text:
            await asyncio.sleep(0.01)

    assert (await work_until(site.client(server), ended(site, "run-2"), told())).succeeded == 1
    assert f"nothing is leased from run {RUN}" in caplog.text


@pytest.fixture
def asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What servers refuse is asked again soon."""
    for name in (
        "lightning_server.client.run_discovery.FIND_SECONDS",
        "lightning_server.client.run_discovery.FIRST_PAUSE",
        "lightning.runner.lease_loop.LOOK_SECONDS",
    ):
        monkeypatch.setattr(name, 0.02)


def refuse(monkeypatch: pytest.MonkeyPatch, client: Client, name: str, *errors: Exception) -> None:
    """Let the client's servers refuse one kind of question so often, in this way."""
    real, left = getattr(client._store, name), list(errors)

    def asked(*of: Any, **how: Any) -> Any:
        if left:
            raise left.pop(0)
        return real(*of, **how)

    monkeypatch.setattr(client._store, name, asked)


FAULT, NOT_SO = StoreError("the server failed at this request"), DataError("not like that")


@pytest.mark.usefixtures("asked_often")
@pytest.mark.parametrize("runs", [(), (RUN,)], ids=["found", "named"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("list_runs", "no run is looked for"),
        ("list_rollouts", f"nothing is leased from run {RUN}"),
        ("watch", f"no news of run {RUN} is heard"),
        ("lease_for_agents", f"nothing is leased from run {RUN}"),
    ],
)
async def test_what_servers_refuse_some_times_ends_nothing(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    said: str,
    runs: tuple[str, ...],
) -> None:
    server = await site.start()
    await site.begin(count=1)
    client = site.client(server, runs=runs, rollouts=2)
    refuse(monkeypatch, client, name, FAULT, NOT_SO, FAULT)
    working = asyncio.create_task(client.work())
    await asyncio.wait_for(ended(site), 30)
    await site.store.create_rollouts([Rollout("late", RUN, Task(7), "group")])
    assert (await asyncio.wait_for(working, 30)).succeeded == 2
    if not runs or name in ("watch", "lease_for_agents"):
        warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert len([text for text in warned if text.startswith(said)]) == 1


@pytest.mark.usefixtures("asked_often")
async def test_a_client_ends_when_all_its_runs_are_refused_for_as_long_as_a_lease_lasts(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await site.start()
    await site.begin(count=1)
    await site.begin("run-2")
    client = site.client(server, runs=[RUN, "run-2"], runner__lease_ttl=0.1)
    asked: list[str] = []

    async def refusing(run: str, worker: str, **_: Any) -> Any:
        asked.append(run)
        raise FAULT

    monkeypatch.setattr(client._store, "lease_for_agents", refusing)
    with pytest.raises(StoreError, match="the server failed at this request"):
        await asyncio.wait_for(client.work(), 30)
    assert min(asked.count(RUN), asked.count("run-2")) > 2


@pytest.mark.parametrize("error", [UnavailableError("the server starts again"), StoreError("answered 404")], ids=repr)
async def test_a_lease_whose_outcome_nobody_takes_is_given_back(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    server = await site.start()
    await site.begin(count=1, max_attempts=1)
    stop = asyncio.Event()
    client = site.client(server, runner__drain=0.1)

    async def away(*_: object) -> Any:
        stop.set()
        raise error

    monkeypatch.setattr(client._store, "complete", away)
    assert (await asyncio.wait_for(client.work(stop), 30)).lost == 0
    (found,) = (await site.rollouts()).values()
    assert found.status is Status.PENDING


async def test_told_to_end_it_waits_for_no_lease(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await site.start()
    await site.begin(count=1)
    stop = asyncio.Event()
    client = site.client(server, runs=[RUN])

    async def frozen(*_: object, **__: object) -> Any:
        stop.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(client._store, "lease_for_agents", frozen)
    assert (await asyncio.wait_for(client.work(stop), 30)).leased == 0


async def test_an_outcome_that_is_too_long_is_told_with_less_in_it(site: Site) -> None:
    """Rollout 0 has long arguments, 1 long outputs, 2 too much of what is never left out, 3 nothing special."""

    async def agent(task: Task, llm: LLM) -> float:
        value = await calling(task, llm)
        lightning.reward(0.5)
        for _ in range(3 if value < 2 else 0):
            emit(ToolEvent("search", "ok", arguments="x" * 4000, output="x" * (0 if value == 0 else 4000)))
        for _ in range(500 if value == 2 else 0):
            lightning.reward(0.5)
        return value

    site.config = with_settings(site.config, {"gateway.max_body_bytes": 8192})
    server = await site.start()
    await site.begin(count=4, max_attempts=1)
    tally = await asyncio.wait_for(site.client(server, agent=agent, rollouts=4).work(), 60)
    assert (tally.succeeded, tally.failed, tally.lost) == (3, 1, 0)
    found = await site.rollouts()
    assert [one.reward for one in found.values()] == [0.0, 1.0, None, 3.0]
    told = [list((await site.store.attempts_of([(f"{RUN}/{n}", None)]))[0].tool_events) for n in range(2)]
    assert [[event.arguments for event in events] for events in told] == [[None] * 3, []]
    assert [len(list((await site.store.attempts_of([(f"{RUN}/{n}", None)]))[0].step_rewards)) for n in range(2)] == [
        1,
        1,
    ]
    lost = found[f"{RUN}/2"]
    assert lost.fault is Fault.INFRASTRUCTURE
    for word in ("too long, of ", "bytes or more, the limit is 8192", "gateway.max_body_bytes"):
        assert word in lost.error


async def test_what_is_refused_of_one_attempt_ends_neither_the_client_nor_other_agents(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, refused = asyncio.Event(), asyncio.Event()

    async def agent(task: Task, llm: LLM) -> float:
        if task.input == 1:
            begun.set()
            await refused.wait()
            await asyncio.sleep(0.1)
        await begun.wait()
        return await calling(task, llm)

    server = await site.start()
    await site.begin(count=2)
    client = site.client(server, agent=agent, rollouts=2)
    complete = client._store.complete

    async def like_nginx(rollout: str, attempt: int, outcome: Outcome, **how: Any) -> Rollout:
        if rollout != f"{RUN}/0":
            return await complete(rollout, attempt, outcome, **how)
        if outcome.fault is not None:
            refused.set()
        raise TooLongError("answered 413, and not as a Lightning Server does")

    monkeypatch.setattr(client._store, "complete", like_nginx)
    tally = await asyncio.wait_for(client.work(), 60)
    assert (tally.leased, tally.succeeded, tally.lost) == (2, 1, 1)
    assert f"rollout {RUN}/0, attempt 1 is lost, its lease runs out" in caplog.text


async def test_an_agent_whose_lease_is_not_prolonged_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def agent(task: Task, llm: LLM) -> float:
        await asked.wait()
        await asyncio.sleep(0.1)
        return await calling(task, llm)

    server = await site.start()
    await site.begin(count=1)
    client = site.client(server, agent=agent, rollouts=1, runner__concurrency=1, runner__lease_ttl=0.3)
    lease = client._store.lease_for_agents

    async def for_long(run: str, worker: str, **asked: Any) -> Any:
        return await lease(run, worker, **{**asked, "ttl": 60.0})

    async def broken(*_: object, **__: object) -> Any:
        asked.set()
        raise StoreError("answered 500")

    monkeypatch.setattr(client._store, "lease_for_agents", for_long)
    monkeypatch.setattr(client._store, "renew", broken)
    assert (await asyncio.wait_for(client.work(), 60)).succeeded == 1


@pytest.mark.parametrize("where", ["complete", "renew"])
async def test_a_token_that_is_refused_in_the_middle_of_a_rollout_ends_the_client(
    site: Site, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async def agent(task: Task, llm: LLM) -> float:
        value = await calling(task, llm)
        await asyncio.sleep(0 if where == "complete" else 60)
        return value

    server = await site.start()
    await site.begin(count=1)
    client = site.client(server, agent=agent, runner__lease_ttl=0.3 if where == "renew" else 60)

    async def refusing(*_: object, **__: object) -> Any:
        raise TokenRefusedError("the token was revoked")

    monkeypatch.setattr(client._store, where, refusing)
    with pytest.raises(TokenRefusedError, match="revoked"):
        await asyncio.wait_for(client.work(), 30)


async def test_a_client_ends_when_all_its_runs_are_over(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    server = await site.start()
    await site.begin(count=1)
    await mark_over(site.store, RUN, True)  # by a trainer that needed no more than was begun
    caplog.set_level("INFO")
    found = await asyncio.wait_for(site.client(server, runs=[RUN]).work(), 60)
    assert (found.succeeded, found.failed) == (1, 0)  # what there was to do is done first
    assert "are over" in caplog.text
    with pytest.raises(TimeoutError):  # its trainer may be about to resume it
        await asyncio.wait_for(site.client(server, runs=[RUN]).work(), 1)
    assert "was over before this client began" in caplog.text
    with pytest.raises(TimeoutError):  # without names it is there for whatever run comes
        await asyncio.wait_for(site.client(server).work(), 1)


async def test_which_runs_are_over_is_what_servers_say_now(site: Site) -> None:
    server = await site.start()
    refused = StoreError("no")
    runs = finding.Runs(site.client(server)._store, ["a", "b"], patience=10)
    for run in "ab":
        runs.answered(run, False)
        runs.answered(run, True)
    assert runs.are_over
    runs.unanswered()
    assert not runs.are_over
    runs.answered("a", True)
    runs.drop("b", refused)
    runs.drop("b", refused)
    with pytest.raises(StoreError, match="no"):  # nothing is left that may give work
        runs.drop("b", refused)


async def test_a_run_that_is_named_may_begin_later(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finding, "FIND_SECONDS", 0.05)
    monkeypatch.setattr("lightning.runner.lease_loop.LOOK_SECONDS", 0.05)
    server = await site.start()
    working = asyncio.create_task(site.client(server, runs=[RUN], rollouts=1).work())
    while "there is no run 'run-1'" not in caplog.text:
        assert not working.done(), await working
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert not working.done()
    await site.begin(count=1)
    assert (await asyncio.wait_for(working, 60)).succeeded == 1
    assert caplog.text.count("there is no run") == 1
