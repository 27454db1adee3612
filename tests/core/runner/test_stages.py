"""Plugins around an attempt: what a stage may do at each point, the order of stages, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from lightning.config.plugin_settings import RunnerConfig
from lightning.errors import RunnerError
from lightning.gateway.stages import CallStage
from lightning.plugins import Plugins
from lightning.plugins import stages as named
from lightning.plugins.stages import NamedStage
from lightning.runner import stages
from lightning.runner.inline import InlineRunner
from lightning.runner.process import ProcessRunner
from lightning.runner.protocol import Agent
from lightning.runner.stages import AttemptLine, AttemptStage
from lightning.types import LLM, Fault, Lease, Outcome, Task

NOWHERE = LLM("http://127.0.0.1:1/v1", "secret-key", "policy")
Leases = Callable[..., Lease]
STRANGER = """
import os
from contextlib import contextmanager
from contextvars import ContextVar

import lightning
from lightning.runner.stages import AttemptRefusedError, AttemptStage
from lightning.types import Fault

said = ContextVar("stranger_said", default="nothing")
log = []


class Stage(AttemptStage):
    api, before = 1, ("branches",)

    def __init__(self, config):
        self.concurrency = config.concurrency

    async def begun(self):
        if self.concurrency == 7:
            raise KeyError("no seven")

    def installed(self):
        os.environ["STRANGER"] = str(self.concurrency)
        return lambda: os.environ.pop("STRANGER")

    @contextmanager
    def around(self, task, llm):
        if task.input == "refused":
            raise AttemptRefusedError("not today", Fault.AGENT)
        if task.input == "fails":
            raise KeyError(f"a bug with {llm.api_key}")
        token = said.set(str(task.input))
        try:
            yield
        finally:
            said.reset(token)
        if task.input == "fails at the end":
            raise KeyError("a bug")

    def noted(self, outcome):
        if outcome.reward == 0.5:
            raise KeyError("no note")
        return None if outcome.reward == 0.25 else [os.getpid(), outcome.reward]

    def heard(self, outcome, note):
        log.append(note)
        if outcome.reward == 0.25:
            raise KeyError("unheard")

    def closed(self):
        log.append("closed")


@lightning.hookimpl
def register_attempt_stages(register):
    register("stranger", Stage)
"""


@pytest.fixture
def stranger(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin with a stage, found as an installed one is."""
    install("stranger-stage", {"stranger": "stranger_stage"}, {"stranger_stage": STRANGER})
    found = Plugins()
    monkeypatch.setattr(named, "plugins", lambda: found)


def make_agent(style: str) -> Agent:
    """By value; it says what it finds around it."""

    def found(task: Task) -> float:
        import os

        from stranger_stage import said

        if task.input == "raises":
            raise ValueError("the agent's own")
        return float((said.get(), os.environ["STRANGER"]) == (task.input, "3"))

    def sync(task: Task, llm: LLM) -> float:
        return found(task)

    async def awaits(task: Task, llm: LLM) -> float:
        await asyncio.sleep(0)
        return found(task)

    return sync if style == "sync" else awaits


async def outcomes(runner: ProcessRunner | InlineRunner, *leases: Lease) -> list[Outcome]:
    await runner.start()
    try:
        return await asyncio.gather(*(runner.run(lease, NOWHERE) for lease in leases))
    finally:
        await runner.close()


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("style", ["sync", "async"])
@pytest.mark.parametrize("kind", [InlineRunner, pytest.param(ProcessRunner, marks=pytest.mark.slow)])
async def test_a_stage_is_around_the_agent_and_fails_closed(
    kind: type[ProcessRunner | InlineRunner], style: str, lease: Leases
) -> None:
    runner = kind(make_agent(style), RunnerConfig(concurrency=3, timeout=60))
    asked = ["one", "two", "refused", "fails", "fails at the end", "raises"]
    one, two, refused, fails, ends, raises = await outcomes(runner, *(lease(name, name) for name in asked))
    assert (one.reward, two.reward) == (1.0, 1.0), one.error + two.error
    assert (refused.fault, refused.error) == (Fault.AGENT, "not today")
    assert (fails.fault, ends.fault) == (Fault.INFRASTRUCTURE, Fault.INFRASTRUCTURE)
    assert fails.error == (
        "the stage 'stranger' of the plugin 'stranger' failed (around: KeyError: 'a bug with <api key>'). Mend the plugin, or "
        "start without it: LIGHTNING_DISABLE_PLUGINS=stranger"
    )
    assert "KeyError: 'a bug'" in ends.error
    assert (raises.fault, "the agent's own" in raises.error) == (Fault.AGENT, True)
    assert "STRANGER" not in os.environ


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("kind", [InlineRunner, pytest.param(ProcessRunner, marks=pytest.mark.slow)])
async def test_a_stage_hears_in_the_runners_process_what_it_has_noted_in_the_agents(
    kind: type[ProcessRunner | InlineRunner], lease: Leases
) -> None:
    runner = kind(lambda task, llm: task.input, RunnerConfig(concurrency=1, timeout=60))
    whole, unnoted, unheard = await outcomes(runner, *(lease(reward, str(reward)) for reward in (1.0, 0.5, 0.25)))
    (pid, reward), *rest, closed = sys.modules["stranger_stage"].log
    assert (whole.reward, reward, pid == os.getpid()) == (1.0, 1.0, kind is InlineRunner)
    assert (closed, set(rest)) == ("closed", {None})
    for outcome, failure in ((unnoted, "noted: KeyError: 'no note'"), (unheard, "heard: KeyError: 'unheard'")):
        assert outcome.fault is Fault.INFRASTRUCTURE
        assert f"the stage 'stranger' of the plugin 'stranger' failed ({failure})" in outcome.error


@pytest.mark.parametrize("kind", [InlineRunner, pytest.param(ProcessRunner, marks=pytest.mark.slow)])
async def test_an_attempt_that_is_told_of_a_stage_which_is_not_here_is_not_made(
    kind: type[ProcessRunner | InlineRunner], lease: Leases
) -> None:
    runner = kind(lambda task, llm: 1.0, RunnerConfig())
    await runner.start()
    try:
        outcome = await runner.run(lease(), replace(NOWHERE, extras={"absent": True}))
    finally:
        await runner.close()
    assert outcome.fault is Fault.INFRASTRUCTURE
    assert "the stage 'absent' around this attempt, and no plugin has it here: the stages are " in outcome.error


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("kind", [InlineRunner, ProcessRunner])
async def test_a_runner_whose_stage_cannot_begin_does_not_start(kind: type[ProcessRunner | InlineRunner]) -> None:
    with pytest.raises(
        RunnerError, match=r"'stranger' of the plugin 'stranger' failed \(begun: KeyError: 'no seven'\)"
    ):
        await kind(make_agent("sync"), RunnerConfig(concurrency=7)).start()


async def test_an_inline_agent_whose_time_is_over_leaves_its_stages(
    lease: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Stage(AttemptStage):
        api = 1

        def around(self, task: Task, llm: LLM) -> AbstractContextManager[None]:
            @contextmanager
            def context() -> Iterator[None]:
                seen.append("in")
                yield
                seen.append("out")

            return context()

    async def agent(task: Task, llm: LLM) -> float:
        await asyncio.sleep(60)
        return 1.0

    line = AttemptLine([NamedStage("mine", Stage())])
    monkeypatch.setattr("lightning.runner.inline.attempt_line", lambda config: line)
    (outcome,) = await outcomes(InlineRunner(agent, RunnerConfig(timeout=0.5)), lease())
    assert (outcome.fault, seen) == (Fault.TIMEOUT, ["in", "out"])


class Encloses(AttemptStage):
    api = 1

    def enclosure(self, base_url: str, files: Any) -> Any:
        raise KeyError("nothing to begin in")


def test_every_stage_is_closed_also_when_one_fails_at_it() -> None:
    closed = []

    class Closing(AttemptStage):
        api = 1

        def __init__(self, name: str) -> None:
            self.name = name

        def closed(self) -> None:
            closed.append(self.name)
            if self.name == "one":
                raise OSError("no room")

    line = AttemptLine([NamedStage(name, Closing(name), "1", "p") for name in ("one", "two")])
    with pytest.raises(RunnerError, match=r"'one'.*no room"):
        line.close()
    assert closed == ["one", "two"]


async def test_agents_are_not_enclosed_twice_nor_in_this_process(
    lease: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = NamedStage("one", Encloses()), NamedStage("two", Encloses(), "1.0", "second")
    with pytest.raises(RunnerError, match=r"'one' of the plugin 'one' and 'two' of the plugin 'second' both enclose"):
        AttemptLine([one, two])
    for module in ("inline", "process"):
        monkeypatch.setattr(f"lightning.runner.{module}.attempt_line", lambda config: AttemptLine([one]))
    with pytest.raises(RunnerError, match=r"'one' of the plugin 'one' encloses .*use runner='process'"):
        await InlineRunner(make_agent("sync"), RunnerConfig()).start()
    with pytest.raises(RunnerError, match=r"'one' of the plugin 'one' failed \(enclosure: KeyError"):
        await ProcessRunner(make_agent("sync"), RunnerConfig()).start()


def test_stages_that_are_written_wrongly_are_refused() -> None:
    class Old(AttemptStage):
        api = 7

    class Misspelt(AttemptStage):
        api = 1

        def arround(self) -> None:
            """Never asked."""

    class Around(AttemptStage):
        api = 1

        def around(self, task: Task, llm: LLM) -> AbstractContextManager[None]:
            raise NotImplementedError

    for stage, why in (
        (Old(), r"written for API 7; this runner has API 1 \(`lightning.runner.stages.API`\)"),
        (Misspelt(), "'arround', which is never asked: did you mean 'around'"),
        (object(), "derive it from `lightning.runner.stages.AttemptStage`"),
    ):
        with pytest.raises(RunnerError, match=why):
            AttemptLine([NamedStage("mine", stage)])  # type: ignore[type-var]
    both = [NamedStage("one", Around()), NamedStage("two", Around())]
    with pytest.raises(RunnerError, match=r'both stand at \'around\'.*set runner.stage_order = \["one", "two"\]'):
        AttemptLine(both)
    assert list(AttemptLine(both, ["two", "one"]).versions) == ["two", "one"]


class Unsent(AttemptStage):
    api = 1

    def __init__(self) -> None:
        self.fine = lambda: None


def test_a_stage_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(RunnerError, match="'mine' of the plugin 'theirs' cannot be sent to agents' processes"):
        AttemptLine([NamedStage("mine", Unsent(), "1.0", "theirs")]).check_packing()


def registered(monkeypatch: pytest.MonkeyPatch, install: Any, source: str) -> None:
    """A plugin whose module has this source and registers what it calls `make` as the stage `mine`; the sandbox is off."""
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "sandbox")
    text = f"import lightning\nfrom lightning.runner.stages import AttemptStage\n{source}\n"
    text += "@lightning.hookimpl\ndef register_attempt_stages(register):\n    register('mine', make)\n"
    install("mine-stage", {"mine": "mine_stage"}, {"mine_stage": text})
    found = Plugins()
    monkeypatch.setattr(named, "plugins", lambda: found)


def test_a_stage_of_any_name_encloses(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "class make(AttemptStage):\n    api = 1\n    def __init__(self, config): pass\n"
        "    def enclosure(self, base_url, files): pass"
    )
    registered(monkeypatch, install, source)
    assert "mine" in stages.attempt_line(RunnerConfig()).enclosing


async def test_what_a_factory_and_an_undo_raise_names_the_plugin(
    install: Any, monkeypatch: pytest.MonkeyPatch, lease: Leases
) -> None:
    registered(monkeypatch, install, "def make(config): raise KeyError('no key')")
    with pytest.raises(RunnerError, match=r"the stage 'mine' of the plugin 'mine' .*cannot be made \(KeyError"):
        stages.attempt_line(RunnerConfig())


@pytest.mark.parametrize(
    ("installed", "said"),
    [("return None", "returned None and not what undoes it"), ("return lambda: 1 / 0", "ZeroDivisionError")],
)
async def test_what_undoes_a_stage_is_the_stages_own(
    installed: str, said: str, install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "class make(AttemptStage):\n    api = 1\n    def __init__(self, config): pass\n    def installed(self): "
    source += installed
    registered(monkeypatch, install, source)
    runner = InlineRunner(make_agent("sync"), RunnerConfig())
    with pytest.raises(RunnerError, match=f"the stage 'mine' of the plugin 'mine' failed .*{said}"):
        await outcomes(runner)


def test_a_class_for_two_lines_is_refused_by_name() -> None:
    class Both(CallStage, AttemptStage):
        api = 1

    with pytest.raises(RunnerError, match=r"derives from CallStage and AttemptStage, which stand in two lines"):
        AttemptLine([NamedStage("both", Both())])


def test_failures_of_stages_can_be_sent_to_another_process() -> None:
    failed = stages.FailedStageError(NamedStage("s", AttemptStage(), "1", "p").failure("around", KeyError("x")))
    again = pickle.loads(pickle.dumps(failed))
    assert (type(again), str(again), again.fault) == (type(failed), str(failed), Fault.INFRASTRUCTURE)


async def test_a_fault_of_the_machine_is_not_blamed_on_the_stage(
    lease: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enclosing(AttemptStage):
        api = 1

        def enclosure(self, base_url: str, files: Any) -> Any:
            return Anywhere()

    class Anywhere:
        inside = None

        def url(self, base_url: str) -> str:
            return base_url

    async def full(self: ProcessRunner, enclosure: object = None) -> None:
        raise OSError(24, "Too many open files")

    runner = ProcessRunner(make_agent("sync"), RunnerConfig())
    runner._line = AttemptLine([NamedStage("well", Enclosing(), "1", "p")])
    runner._server = object()  # type: ignore[assignment]
    monkeypatch.setattr(ProcessRunner, "_new_server", full)
    ended = await runner.run(lease("one", "one"), NOWHERE)
    assert (ended.fault, "Too many open files" in ended.error) == (Fault.INFRASTRUCTURE, True)
    assert "stage" not in ended.error


async def test_an_enclosure_that_fails_keeps_no_process(lease: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address cannot be told: the attempt is the infrastructure's fault, and nothing is left of it."""

    class Broken:
        inside = None

        def url(self, base_url: str) -> str:
            raise KeyError("no address")

    class Enclosing(AttemptStage):
        api = 1

        def enclosure(self, base_url: str, files: Any) -> Any:
            return Broken()

    runner = ProcessRunner(make_agent("sync"), RunnerConfig())
    runner._line = AttemptLine([NamedStage("broken", Enclosing(), "1", "p")])
    runner._server = object()  # type: ignore[assignment]
    ended = await runner.run(lease("one", "one"), NOWHERE)
    assert ended.fault is Fault.INFRASTRUCTURE
    assert "the stage 'broken' of the plugin 'p' failed (enclosure: KeyError" in ended.error
    assert not runner._enclosed
    assert not runner._idle
