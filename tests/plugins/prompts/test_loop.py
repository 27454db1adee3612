"""Prompts are tuned through the whole house: runner, gateway, store, a scripted policy and a scripted optimiser model."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, DataError, OptimizerError, PolicyServerError, RunnerError
from lightning.instrument import components
from lightning.plugins import plugins
from lightning.store import Store
from lightning.store.url import sqlite_url
from lightning.testing.chat_server import ChatRequest, ChatServer
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer import Trainer, stack
from lightning.trainer.context import is_over
from lightning.types import LLM, Rollout, Task
from lightning_prompts import Bench, PromptAlgorithm, Trial, chat_model, loop
from lightning_prompts.apo import APO
from lightning_prompts.loop import PromptBench, component_of
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import list_aliases, list_resources, put_resource, set_alias
from lightning_server.control import AgentAccess

START = "Greet {name}."
BETTER = "Greet {name} with politeness."
BEST = "Greet {name} with politeness, in French."
TRAIN = [Task(f"guest {number}") for number in range(6)]
VAL = [Task(f"visitor {number}") for number in range(4)]

greeter = lightning.component("greeter", prompt=START)


def agent(task: Task, llm: LLM) -> float:
    """One call; the reward is half for each of two virtues, which the policy has only when the prompt asks for them."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": greeter.prompt.format(name=task.input)}]}
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    with greeter:
        request = urllib.request.Request(f"{llm.base_url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as reply:
                said = json.load(reply)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            error.close()
            raise
    return 0.5 * ("please" in said) + 0.5 * ("bonjour" in said)


def policy(body: Any) -> Reply:
    asked = str(body["messages"])
    return Reply(" ".join(["hello", "please" * ("politeness" in asked), "bonjour" * ("French" in asked)]))


class FakePolicy:
    """A scripted vLLM as a policy server of its own."""

    version = 0

    def __init__(self, script: Callable[[Any], Reply] = policy) -> None:
        self.fake = FakeVLLM(script=script)

    @property
    def url(self) -> str:
        return self.fake.url

    @property
    def model(self) -> str:
        return self.fake.model

    alias, models, claim = model, (), ""

    async def start(self) -> None:
        await self.fake.start()

    async def wait_died(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self.fake.close()


@pytest.fixture(autouse=True)
def house(monkeypatch: pytest.MonkeyPatch) -> FakePolicy:
    """Every trainer gets a scripted policy, and pauses between attempts are short."""
    made = FakePolicy()
    monkeypatch.setattr(stack, "make_policy_server", lambda *_, **__: made)
    monkeypatch.setattr(chat_model, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("WRITER_KEY", "secret-of-the-writer")
    return made


def improve(call: ChatRequest) -> str:
    """The scripted optimiser model: it sees one fault at a time."""
    if "<review>" not in call.text:
        return "1. The template does not ask for politeness, or not for French."
    template = call.text.partition("<template>\n")[2].partition("\n</template>")[0]
    return f"Here it is.\n<prompt>\n{BETTER if template == START else BEST}\n</prompt>"


@pytest.fixture
def writer() -> Iterator[ChatServer]:
    with ChatServer(answer=improve) as server:
        yield server


def apo(writer: ChatServer, **changes: Any) -> APO:
    optimizer = {"model": "scripted", "base_url": writer.llm().base_url, "api_key_env": "WRITER_KEY", "attempts": 2}
    options: dict[str, Any] = {
        "rounds": 3,
        "beam_width": 2,
        "branch_factor": 2,
        "minibatch": 2,
        "selection_rollouts": 8,
    }
    return APO("greeter", **{"optimizer": optimizer, **options, **changes})


def trainer(tmp_path: Path, algorithm: Any, *, settings: dict[str, Any] | None = None, **options: Any) -> Trainer:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    config = with_settings(Config(), {"runner.concurrency": 8, "trainer.trackers": ("jsonl",), **(settings or {})})
    options = {"out": tmp_path / "run", **options}
    return Trainer(model, algorithm, runner="inline", config=config, progress=False, **options)


def look(folder: Path, read: Callable[[Store], Any]) -> Any:
    async def main() -> Any:
        store = plugins().store(sqlite_url(folder / "lightning.db"))
        await store.open()
        try:
            return await read(store)
        finally:
            await store.close()

    return asyncio.run(main())


def everything(folder: Path) -> tuple[list[Resource], dict[str, int], list[Rollout]]:
    async def read(store: Store) -> Any:
        aliases = {alias.alias: alias.version for alias in await list_aliases(store, "greeter")}
        return await list_resources(store, "greeter"), aliases, (await store.list_rollouts("run")).items

    found: tuple[list[Resource], dict[str, int], list[Rollout]] = look(folder, read)
    return found


def test_the_reward_rises_and_the_best_prompt_goes_live(tmp_path: Path, writer: ChatServer) -> None:
    made = trainer(tmp_path, apo(writer))
    summary = made.fit(agent, TRAIN, VAL)
    assert (summary.before, summary.after) == (0.0, 1.0)
    versions, aliases, rollouts = everything(made.out)
    assert [item.content for item in versions] == [START, BETTER, BEST]
    assert [item.metadata.get("parent") for item in versions] == [None, 1, 2]
    assert aliases == {"latest": 3, "production": 3}
    assert (made.out / "prompts" / "greeter.txt").read_text() == BEST
    earned = {(rollout.resources["greeter"], rollout.reward) for rollout in rollouts}
    assert earned == {(1, 0.0), (2, 0.5), (3, 1.0)}, "each rollout ran with the prompt it says"
    assert {call.key for call in writer.calls} == {"secret-of-the-writer"}
    assert "secret-of-the-writer" not in look(made.out, lambda store: store.get_run("run")).config.__repr__()


def test_the_optimiser_model_is_shown_what_happened(tmp_path: Path, writer: ChatServer) -> None:
    trainer(tmp_path, apo(writer, rounds=1)).fit(agent, TRAIN, VAL)
    asked = writer.calls[0].text
    for part in (START, "Task: guest", "Greet guest", "[model call 1, by greeter]", "[response]\nhello", "Reward: 0"):
        assert part in asked
    edits = [call.text for call in writer.calls if "<review>" in call.text]
    assert all("does not ask for politeness" in text and "fields {name}:" in text for text in edits)


class Killed(BaseException):
    """What a test throws where a `kill -9` would fall."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, float | None]]:
    """The rollouts of a run that nobody killed."""
    with pytest.MonkeyPatch.context() as patch, ChatServer(answer=improve) as server:
        patch.setattr(stack, "make_policy_server", lambda *_, **__: FakePolicy())
        folder = tmp_path_factory.mktemp("undisturbed")
        trainer(folder, small(server)).fit(agent, TRAIN, VAL)
    return [(rollout.id, rollout.reward) for rollout in everything(folder / "run")[2]]


def small(writer: ChatServer) -> APO:
    return apo(writer, rounds=2, beam_width=1, selection_rollouts=6)


def lethal(name: str, number: int, patch: pytest.MonkeyPatch, *, after: bool) -> None:
    """Kill the run at the `number`-th time that its bench does a thing, before or after it did it."""
    method, done = getattr(PromptBench, name), 0

    def dies(self: PromptBench, *given: Any, **named: Any) -> Any:
        nonlocal done
        done += 1
        if done == number and not after:
            raise Killed(name)
        return finish(method(self, *given, **named)) if done == number else method(self, *given, **named)

    def finish(result: Any) -> Any:
        if not asyncio.iscoroutine(result):
            raise Killed(name)

        async def ended() -> Any:
            await result
            raise Killed(name)

        return ended()

    patch.setattr(PromptBench, name, dies)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "after"),
    [
        ("_run", 3, False),
        ("_finished", 6, False),
        ("_finished", 13, True),
        ("ask", 3, True),
        ("keep", 1, True),
        ("remember", 5, False),
        ("report", 2, True),
        ("measure", 1, True),
    ],
)
def test_killed_at_any_moment_a_resume_ends_where_an_undisturbed_run_does(
    tmp_path: Path,
    writer: ChatServer,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[tuple[str, float | None]],
    name: str,
    number: int,
    after: bool,
) -> None:
    with monkeypatch.context() as patch:
        lethal(name, number, patch, after=after)
        with pytest.raises(Killed):
            trainer(tmp_path, small(writer)).fit(agent, TRAIN, VAL)
    summary = trainer(tmp_path, small(writer), resume=True).fit(agent, TRAIN, VAL)
    assert (summary.before, summary.after) == (0.0, 1.0)
    versions, aliases, rollouts = everything(tmp_path / "run")
    assert ([item.content for item in versions], aliases["production"]) == ([START, BETTER, BEST], 3)
    assert [(rollout.id, rollout.reward) for rollout in rollouts] == undisturbed


@pytest.mark.slow
def test_a_prompt_is_tuned_in_a_project(tmp_path: Path, writer: ChatServer) -> None:
    team = {"trainer.project": "team-a"}
    summary = trainer(tmp_path, small(writer), settings=team).fit(agent, TRAIN, VAL)
    assert (summary.before, summary.after) == (0.0, 1.0)

    async def read(store: Store) -> Any:
        run = await store.get_run("run")
        assert run is not None
        rollouts = (await store.list_rollouts("run")).items
        return run.project, {item.name for item in await list_resources(store)}, {*rollouts[0].resources}

    assert look(tmp_path / "run", read) == ("team-a", {"project::team-a::greeter"}, {"project::team-a::greeter"})
    live = {**team, "runner.prompts": {"greeter": "resource:greeter@production"}}
    report = trainer(tmp_path, small(writer), settings=live).dev(agent, TRAIN, count=1)
    assert [row.reward for row in report.rows] == [1.0]
    with pytest.raises(ConfigError, match="run 'run' is of the project 'team-a'"):
        trainer(tmp_path, small(writer), resume=True).fit(agent, TRAIN, VAL)
    again = trainer(tmp_path, small(writer), settings=team, resume=True).fit(agent, TRAIN, VAL)
    assert again.after == 1.0


def test_what_waits_of_a_killed_run_is_leased_with_its_prompt_before_the_resumed_search_begins(
    tmp_path: Path, writer: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        lethal("_run", 1, patch, after=False)
        with pytest.raises(Killed):
            trainer(tmp_path, small(writer)).fit(agent, TRAIN, VAL)

    async def wait_for_an_agent(store: Store) -> None:
        await store.create_rollouts([Rollout("run/val/v1/0", "run", VAL[0], "g", resources={"greeter": 1})])

    look(tmp_path / "run", wait_for_an_agent)
    prompts: list[dict[str, str]] = []

    async def client(opened: stack.Stack, *_: object) -> None:
        (lease,) = await opened.store.lease("run", "client")
        prompts.append(dict((await AgentAccess(opened.gateway, "").llm_for(lease, opened.store)).prompts))
        raise Killed

    monkeypatch.setattr(loop, "tune", client)
    with pytest.raises(Killed):
        trainer(tmp_path, small(writer), resume=True).fit(agent, TRAIN, VAL)
    assert prompts == [{"greeter": START}]


def test_seconds_are_those_of_all_work_of_a_round_and_a_resume_tells_nothing_twice(
    tmp_path: Path, writer: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, ran = count(), Counter[str]()
    execute = stack.Stack.execute

    async def executes(self: stack.Stack, rollouts: list[Rollout], told: Callable[[Rollout], None]) -> None:
        ran["eval" if rollouts[0].task in VAL else "rollout"] += 1
        await execute(self, rollouts, told)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    monkeypatch.setattr(stack.Stack, "execute", executes)
    first = trainer(tmp_path, apo(writer, rounds=1)).fit(agent, TRAIN, VAL)
    assert ran["eval"] == 3, "the start; the beam and the winner, in one round"
    assert (first.time["rollout"], first.time["eval"]) == (ran["rollout"], ran["eval"])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    again = trainer(tmp_path, apo(writer, rounds=1), resume=True).fit(agent, TRAIN, VAL)
    assert (again.time["rollout"], again.time["eval"]) == (first.time["rollout"], first.time["eval"])
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines


def test_deaths_before_a_round_are_no_reason_to_end_a_search(
    tmp_path: Path, writer: ChatServer, house: FakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    died, restarted, report, reports = asyncio.Event(), asyncio.Event(), PromptBench.report, 0

    async def wait_died() -> None:
        await died.wait()
        died.clear()

    async def restart(weights: Path | None, version: int) -> None:
        restarted.set()

    async def reports_and_dies(self: PromptBench, *given: Any) -> None:
        nonlocal reports
        reports += 1
        await report(self, *given)
        for _ in range(stack.MAX_RESTARTS - 1):
            restarted.clear()
            died.set()
            async with asyncio.timeout(20):
                await restarted.wait()
                await self._stack._serving.wait()

    monkeypatch.setattr(house, "wait_died", wait_died)
    monkeypatch.setattr(house, "restart", restart, raising=False)
    monkeypatch.setattr(PromptBench, "report", reports_and_dies)
    assert trainer(tmp_path, apo(writer, rounds=1)).fit(agent, TRAIN, VAL).after is not None
    assert reports > 1


@pytest.mark.slow
def test_a_finished_run_asks_and_runs_nothing_again_and_leaves_the_alias_where_it_was_put(
    tmp_path: Path, writer: ChatServer
) -> None:
    made = trainer(tmp_path, apo(writer))
    made.fit(agent, TRAIN, VAL)
    before, calls = everything(made.out), len(writer.calls)
    look(made.out, lambda store: set_alias(store, "greeter", "production", 1))
    trainer(tmp_path, apo(writer), resume=True).fit(agent, TRAIN, VAL)
    versions, aliases, rollouts = everything(made.out)
    assert (versions, rollouts, len(writer.calls)) == (before[0], before[2], calls)
    assert aliases["production"] == 1


BAD = {
    "empty": lambda call: "",
    "no_prompt": lambda call: "I would say it more politely.",
    "unchanged": lambda call: f"<prompt>{START}</prompt>",
    "lost_placeholder": lambda call: "<prompt>Greet the guest with politeness.</prompt>",
    "invented_placeholder": lambda call: "<prompt>Greet {name} of {town} with politeness.</prompt>",
    "not_a_template": lambda call: '<prompt>Greet {name} politely, as {"greeting": 1}</prompt>',
    "too_long": lambda call: f"<prompt>{BETTER}{'!' * 500}</prompt>",
}


@pytest.mark.parametrize("reason", BAD)
def test_what_cannot_be_used_is_refused_and_counted(tmp_path: Path, writer: ChatServer, reason: str) -> None:
    writer.answer = lambda call: BAD[reason](call) if "<review>" in call.text else "1. It is rude."
    made = trainer(tmp_path, apo(writer, rounds=1, longest_prompt=200))
    summary = made.fit(agent, TRAIN, VAL)
    assert (summary.before, summary.after) == (0.0, 0.0)
    versions, aliases, _ = everything(made.out)
    assert ([item.content for item in versions], aliases["production"]) == ([START], 1)
    points = look(made.out, lambda store: store.metrics("run"))
    assert points[-1].values[f"refused/{reason}"] == 2.0
    assert points[-1].values["candidates"] == 0.0


def test_an_edit_that_does_no_good_does_not_go_live(tmp_path: Path, writer: ChatServer) -> None:
    writer.answer = lambda call: "<prompt>Be rude to {name}!</prompt>" if "<review>" in call.text else "1. Too polite."
    made = trainer(tmp_path, apo(writer, rounds=1))
    made.fit(agent, TRAIN, VAL)
    versions, aliases, _ = everything(made.out)
    assert (len(versions), aliases["production"]) == (2, 1)


def test_an_optimiser_model_that_is_sometimes_away_costs_only_some_candidates(
    tmp_path: Path, writer: ChatServer, caplog: pytest.LogCaptureFixture
) -> None:
    def moody(call: ChatRequest) -> str:
        if len(writer.calls) in (1, 3):
            raise ConnectionError
        return improve(call)

    writer.answer = moody
    optimizer = {"model": "scripted", "base_url": writer.llm().base_url, "attempts": 1, "concurrency": 1}
    made = trainer(tmp_path, apo(writer, rounds=1, branch_factor=3, optimizer=optimizer))
    with caplog.at_level(logging.WARNING):
        made.fit(agent, TRAIN, VAL)
    points = look(made.out, lambda store: store.metrics("run"))
    assert points[1].values["refused/no_answer"] == 2.0
    assert points[1].values["candidates"] == 1.0
    assert "2 edits are dropped" in caplog.text


@pytest.mark.slow
def test_without_any_answer_the_run_stops_and_can_be_resumed(tmp_path: Path, writer: ChatServer) -> None:
    def away(call: ChatRequest) -> str:
        raise ConnectionError

    writer.answer = away
    with pytest.raises(OptimizerError, match=r"round 1: no question was answered.*2 attempts.*resume"):
        trainer(tmp_path, apo(writer)).fit(agent, TRAIN, VAL)
    writer.answer = improve
    summary = trainer(tmp_path, apo(writer), resume=True).fit(agent, TRAIN, VAL)
    assert summary.after == 1.0


def test_the_budget_is_never_exceeded_and_what_it_bought_is_used(tmp_path: Path, writer: ChatServer) -> None:
    made = trainer(tmp_path, apo(writer, max_rollouts=24))
    summary = made.fit(agent, TRAIN, VAL)
    _, aliases, rollouts = everything(made.out)
    assert len(rollouts) <= 24
    assert (summary.after, aliases["production"]) == (0.5, 2)
    assert sum(rollout.id.startswith("run/final/") for rollout in rollouts) == len(VAL)


def refusing(body: Any) -> Reply:
    return Reply(status=500)


@pytest.mark.slow
def test_a_last_measurement_that_was_lost_and_cannot_be_paid_again_keeps_nothing_from_going_live(
    tmp_path: Path, writer: ChatServer, house: FakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, settings = PromptBench.measure, {"runner.max_attempts": 1}

    async def measured(self: PromptBench, best: Resource) -> None:
        house.fake.script = refusing
        await measure(self, best)

    with monkeypatch.context() as patch:
        patch.setattr(PromptBench, "measure", measured)
        with pytest.raises(RunnerError, match="all 4 rollouts were lost"):
            trainer(tmp_path, apo(writer, max_rollouts=24), settings=settings).fit(agent, TRAIN, VAL)
    house.fake.script = policy
    spent = len(everything(tmp_path / "run")[2])
    made = trainer(tmp_path, apo(writer, max_rollouts=spent), settings=settings, resume=True)
    assert made.fit(agent, TRAIN, VAL).after is None
    _, aliases, rollouts = everything(made.out)
    assert (len(rollouts), aliases["production"]) == (spent, 2)
    assert (made.out / "prompts" / "greeter.txt").read_text() == BETTER


@pytest.mark.slow
def test_a_start_that_was_lost_and_cannot_be_paid_again_says_so(
    tmp_path: Path, writer: ChatServer, house: FakePolicy
) -> None:
    house.fake.script = refusing
    with pytest.raises(RunnerError, match="all 4 rollouts were lost"):
        trainer(tmp_path, apo(writer, max_rollouts=9)).fit(agent, TRAIN, VAL)
    house.fake.script = policy
    with pytest.raises(RunnerError, match=r"cannot be measured: .*max_rollouts=9.* with a larger max_rollouts"):
        trainer(tmp_path, apo(writer, max_rollouts=9), resume=True).fit(agent, TRAIN, VAL)
    assert trainer(tmp_path, apo(writer, max_rollouts=40), resume=True).fit(agent, TRAIN, VAL).before == 0.0


def test_the_policy_writes_its_own_prompts_where_no_optimiser_is_named(tmp_path: Path, house: FakePolicy) -> None:
    def both(body: Any) -> Reply:
        text = body["messages"][-1]["content"]
        if "</template>" in text:
            call = ChatRequest("", {}, body)
            return Reply(improve(call))
        return policy(body)

    house.fake.script = both
    summary = trainer(
        tmp_path, APO("greeter", rounds=2, beam_width=1, branch_factor=1, minibatch=2, selection_rollouts=4)
    ).fit(agent, TRAIN, VAL)
    assert summary.after == 1.0


def test_the_optimiser_model_can_be_a_setting_and_the_algorithms_own_wins(
    tmp_path: Path, writer: ChatServer, house: FakePolicy
) -> None:
    here = {"optimizer_model.model": "written-here", "optimizer_model.base_url": writer.llm().base_url}
    settings = {**here, "optimizer_model.api_key_env": "WRITER_KEY", "optimizer_model.temperature": 0.5}
    algorithm = APO("greeter", rounds=2, beam_width=1, branch_factor=1, minibatch=2, selection_rollouts=4)
    made = trainer(tmp_path, algorithm, settings=settings)
    assert made.fit(agent, TRAIN, VAL).after == 1.0
    asked = {(call.key, call.body["model"], call.body["temperature"]) for call in writer.calls}
    assert asked == {("secret-of-the-writer", "written-here", 0.5)}
    assert not any("</template>" in str(sent.body) for sent in house.fake.requests), "the policy was not asked"
    kept = look(made.out, lambda store: store.get_run("run")).config["config"]["optimizer_model"]
    assert (kept["model"], kept["api_key_env"]) == ("written-here", "WRITER_KEY")
    trainer(tmp_path, algorithm, settings=here | {"optimizer_model.timeout": 9.0}, resume=True).fit(agent, TRAIN, VAL)
    writer.calls.clear()
    trainer(tmp_path, apo(writer, rounds=1), settings=settings, out=tmp_path / "other").fit(agent, TRAIN, VAL)
    assert {call.body["model"] for call in writer.calls} == {"scripted"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "m"}, "needs both: a model, and the base_url"),
        ({"base_url": "http://x/v1"}, "needs both: a model, and the base_url"),
        ({"model": "m", "base_url": "http://me:sk-123@x/v1"}, "has a user, a password or a query"),
        ({"model": "m", "base_url": "http://x/v1", "api_key_env": "sk-123"}, "cannot name an environment variable"),
    ],
)
def test_a_setting_that_cannot_be_an_optimiser_model_is_refused_before_it_is_kept(
    tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    given = {f"optimizer_model.{name}": value for name, value in settings.items()}
    with pytest.raises(ConfigError, match=words) as caught:
        trainer(tmp_path, "grpo", settings=given)
    assert "sk-123" not in str(caught.value)


def test_held_out_tasks_are_needed_and_the_budget_must_hold_them(tmp_path: Path, writer: ChatServer) -> None:
    with pytest.raises(DataError, match="give fit\\(\\) some in `val`"):
        trainer(tmp_path, apo(writer)).fit(agent, TRAIN)
    with pytest.raises(ConfigError, match="allow more than 8"):
        trainer(tmp_path, apo(writer, max_rollouts=8)).fit(agent, TRAIN, VAL)


def test_an_agent_that_always_fails_stops_the_search_at_once(tmp_path: Path, writer: ChatServer) -> None:
    def broken(task: Task, llm: LLM) -> float:
        raise ValueError("no such table: guests")

    with pytest.raises(RunnerError, match="earned no reward on any held-out task"):
        trainer(tmp_path, apo(writer)).fit(broken, TRAIN, VAL)


def test_where_the_starting_prompt_comes_from(tmp_path: Path, writer: ChatServer) -> None:
    with pytest.raises(ConfigError, match="prompt of component 'nobody' is not known"):
        trainer(tmp_path, APO("nobody")).fit(agent, TRAIN, VAL)
    given = trainer(tmp_path, apo(writer, prompt="Say hello to {name}.", rounds=1), out=tmp_path / "given")
    given.fit(agent, TRAIN, VAL)
    assert everything_of(given.out)[0].content == "Say hello to {name}."
    settings = {"runner.prompts": {"greeter": "Hail {name}!"}}
    literal = trainer(tmp_path, apo(writer, rounds=1), settings=settings, out=tmp_path / "literal")
    literal.fit(agent, TRAIN, VAL)
    assert everything_of(literal.out)[0].content == "Hail {name}!"


def everything_of(folder: Path) -> list[Resource]:
    found: list[Resource] = look(folder, lambda store: list_resources(store, "greeter"))
    return found


@pytest.mark.slow
def test_the_next_run_starts_from_what_is_live(tmp_path: Path, writer: ChatServer) -> None:
    trainer(tmp_path, apo(writer, rounds=1)).fit(agent, TRAIN, VAL)
    settings = {"runner.prompts": {"greeter": f"resource:{tmp_path / 'run'}#greeter@production"}}
    again = trainer(tmp_path, apo(writer, rounds=1), settings=settings, out=tmp_path / "again")
    summary = again.fit(agent, TRAIN, VAL)
    assert (summary.before, summary.after) == (0.5, 1.0)
    versions = everything_of(again.out)
    assert [item.content for item in versions] == [BETTER, BEST]
    assert versions[0].metadata["origin"] == {"store": str(tmp_path / "run"), "version": 2}


def test_a_prompt_algorithm_of_ones_own(tmp_path: Path) -> None:
    class Shout(PromptAlgorithm):
        name, component, prompt, alias, max_rollouts, optimizer_model = "shout", "greeter", None, "loud", None, None

        async def tune(self, bench: Bench) -> Resource:
            return await bench.keep(f"{bench.start.content}!".upper().replace("{NAME}", "{name}"), {"parent": 1})

    made = trainer(tmp_path, Shout())
    made.fit(agent, TRAIN, VAL)
    assert everything(made.out)[1] == {"latest": 2, "loud": 2}
    assert look(made.out, lambda store: is_over(store, "run")) is True


def test_a_search_of_ones_own_that_forgets_its_budget_is_told(tmp_path: Path) -> None:
    class Spend(PromptAlgorithm):
        name, component, prompt, alias, max_rollouts, optimizer_model = "spend", "greeter", None, "loud", 9, None

        async def tune(self, bench: Bench) -> Resource:
            await bench.run([Trial(1, bench.train, "all", "train", 1)])
            return bench.start

    with pytest.raises(ConfigError, match=r"spend ended without a prompt: 6 more rollouts .* catch BudgetSpentError"):
        trainer(tmp_path, Spend()).fit(agent, TRAIN, VAL)


def test_a_server_left_in_the_middle_of_an_update_is_named(
    tmp_path: Path, writer: ChatServer, house: FakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house, "version", -1)
    with pytest.raises(PolicyServerError, match="left in the middle of an update"):
        trainer(tmp_path, apo(writer)).fit(agent, TRAIN, VAL)


def test_kinds_are_not_mixed_up(tmp_path: Path, writer: ChatServer) -> None:
    made = trainer(tmp_path, apo(writer), settings={"runner.prompts": {"greeter": "resource:limits"}})
    made.out.mkdir()
    look(made.out, lambda store: put_resource(store, Resource("limits", {}, ResourceKind.CONFIG)))
    with pytest.raises(ConfigError, match="limits@1 is a config, not a prompt"):
        made.fit(agent, TRAIN, VAL)


@pytest.mark.slow
def test_a_finished_run_may_be_given_more_rounds(tmp_path: Path, writer: ChatServer) -> None:
    first = trainer(tmp_path, apo(writer, rounds=1)).fit(agent, TRAIN, VAL)
    assert first.after == 0.5
    more = trainer(tmp_path, apo(writer, rounds=2), resume=True).fit(agent, TRAIN, VAL)
    assert (more.before, more.after) == (0.0, 1.0)
    assert everything(tmp_path / "run")[1]["production"] == 3


def test_held_out_evaluations_of_all_prompts_have_the_same_temperature(
    tmp_path: Path, writer: ChatServer, house: FakePolicy
) -> None:
    settings = {"trainer.eval_temperature": 0.0}
    trainer(tmp_path, apo(writer, rounds=1), settings=settings).fit(agent, TRAIN, VAL)
    held_out = [asked.body for asked in house.fake.requests if "visitor" in str(asked.body["messages"])]
    assert {body["temperature"] for body in held_out} == {0.0}
    assert any("politeness" in str(body["messages"]) for body in held_out)
    assert all(
        "temperature" not in asked.body for asked in house.fake.requests if "guest" in str(asked.body["messages"])
    )


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, r"the agent's module makes no component\(\.\.\., prompt=\.\.\.\)"),
        ({"a": "x", "b": "y"}, "components 'a', 'b'"),
    ],
)
def test_which_component_must_be_clear(monkeypatch: pytest.MonkeyPatch, known: dict[str, str], words: str) -> None:
    monkeypatch.setattr(components, "_prompts", known)
    with pytest.raises(ConfigError, match=words):
        component_of(APO())
    assert component_of(APO("b")) == "b"
    monkeypatch.setattr(components, "_prompts", {"only": "x"})
    assert component_of(APO()) == "only"


def test_a_component_that_the_module_does_not_make_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(components, "_prompts", {"writer": "x"})
    assert component_of(APO("writer")) == "writer"
    assert not caplog.records
    assert component_of(APO("writter")) == "writter"
    assert "'writter', and the agent's module makes 'writer'" in caplog.text
    with pytest.raises(ConfigError, match="without /"):
        APO("a/b")


def test_a_component_made_with_several_prompts_has_none_to_start_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "_prompts", {})
    for text in ("one", "one", "two", "one"):
        lightning.component("fickle", prompt=text)
    assert components.declared_prompts() == {"fickle": None}


def test_a_dry_run_has_the_prompts_of_the_run(tmp_path: Path, house: FakePolicy) -> None:
    made = trainer(tmp_path, "grpo", settings={"runner.prompts": {"greeter": "resource:greeter@production"}})
    with pytest.raises(ConfigError, match="there is no database at"):
        made.dev(agent, TRAIN, count=1)

    async def fill(store: Store) -> None:
        await put_resource(store, Resource("greeter", BEST))
        await set_alias(store, "greeter", "production", 1)

    look(made.out, fill)
    make_tiny_model(made.model)  # what is no model folder is refused, by a dry run, too
    report = made.dev(agent, TRAIN, count=1)
    assert [row.reward for row in report.rows] == [1.0]

    async def kept(store: Store) -> list[tuple[str, float | None]]:
        runs = [run.id for run in await store.list_runs()]
        return [(run, item.reward) for run in runs for item in (await store.list_rollouts(run)).items]

    assert look(made.out / "dev", kept) == [("dev-2", 1.0)]  # the first found no prompts and ran nothing
