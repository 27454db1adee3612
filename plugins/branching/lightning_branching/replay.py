"""Replay a recorded rollout: the agent's own code runs in this process, and its model calls are answered from the record.

The invariant: no model is asked, and nothing is stored. The result lists all differences from the record.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from lightning.asyncio_utils import outside_of_loops
from lightning.config import RunnerConfig
from lightning.errors import DataError
from lightning.runner.inline import run_here
from lightning.runner.protocol import Agent
from lightning.runner.worker import seed_process
from lightning.types import Fault, Json, Outcome, ToolEvent, as_texts

from lightning_branching.divergence import Divergence
from lightning_branching.recorded import RecordedRollout
from lightning_branching.recorded_tools import RecordedRuns, answer_tools
from lightning_branching.replay_server import ReplayServer


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay. Of the `calls` recorded calls, the agent made `answered` again; `missing` are the callers of the
    others. `outcome` is the agent's; None if a program that lightning did not start ran (`--serve`). `stopped` says that the
    replay was ended after a number of calls (`until`). `changes` describe differences of the outcome and of the tools."""

    calls: int
    answered: int
    missing: tuple[str, ...]
    divergences: tuple[Divergence, ...]
    changes: tuple[str, ...] = ()
    outcome: Outcome | None = None
    stopped: bool = False
    has_outcome: bool = True
    """Whether the recorded outcome is known; that of an attempt before the last is not kept."""

    @property
    def same(self) -> bool | None:
        """Whether the replay equals the record, as far as it went; None if nothing was compared."""
        if self.divergences or self.changes or (self.missing and not self.stopped):
            return False
        compared = not self.stopped and self.outcome is not None and self.has_outcome
        return True if self.answered or compared else None

    def __str__(self) -> str:
        lines = [f"{self.answered} of {self.calls} recorded calls were asked for and answered; 0 calls of a model"]
        if self.missing and not self.stopped:
            counted = ", ".join(f"{caller} ({count})" for caller, count in Counter(self.missing).items())
            lines.append(f"{len(self.missing)} recorded calls were not asked for: {counted}")
        lines += [str(each) for each in self.divergences]
        lines += self.changes
        if not self.has_outcome:
            lines.append("the outcome of this attempt is not kept, and was not compared: a later attempt followed")
        return "\n".join([*lines, self._verdict])

    @property
    def _verdict(self) -> str:
        if self.same is None:
            return "nothing was compared: no recorded call was asked for"
        if self.same and self.stopped:
            return f"the replay is the recorded rollout up to call {self.answered}; how it ends was not compared"
        return "the replay is the recorded rollout" if self.same else "the replay is another rollout"


def replay_agent(
    recorded: RecordedRollout,
    agent: Agent,
    *,
    until: int | None = None,
    recorded_tools: bool = True,
    adapters: Sequence[str] | None = None,
    reroute: Sequence[str] = (),
    prompts: Mapping[str, str] | None = None,
    seed: int | None = None,
    run_unrecorded: bool = False,
    longer: float = 10.0,
) -> ReplayResult:
    """Run an agent once more on its task, with the stages of plugins around it as around any attempt.

    `until` ends the replay after that many calls. With `recorded_tools` each `lightning.tool` returns its recorded result; for
    arguments without a recorded run it raises `DataError`, or with `run_unrecorded` it runs. Tools of frameworks always run.
    `prompts` and `seed` are those that the rollout had. `longer` is that of `ReplayServer`. `random`, numpy, torch and
    `uuid.uuid4` are seeded while the agent runs, and random again afterwards. The agent runs in this thread, or in another
    thread if an event loop runs in this one.
    """
    with ExitStack() as closing:
        server = closing.enter_context(
            served(ReplayServer(recorded, until, prompts=prompts or {}, seed=seed, longer=longer))
        )
        tools = RecordedRuns(recorded.tool_events)
        config = RunnerConfig(
            adapters=None if adapters is None else as_texts(adapters, "adapters"), reroute=as_texts(reroute, "reroute")
        )

        def take(name: str, arguments: Json, function: object) -> ToolEvent | None:
            found = tools.take(name, arguments, function)
            if found is None and not run_unrecorded:
                raise DataError(
                    f"the tool {name} has no recorded run with the arguments {_text(arguments)[:200]} left, and was not run: "
                    "--yes (run_unrecorded) runs it"
                )
            return found

        if recorded_tools:
            closing.enter_context(answer_tools(server.llm.api_key, take))
        closing.callback(seed_process, None)
        seed_process(seed)

        def run() -> Outcome:
            server.threads = threading.active_count()
            with asyncio.Runner() as loop:
                return run_here(agent, recorded.rollout.task, server.llm, loop, config)

        outcome = outside_of_loops(run)
    return result_of(server, outcome, tools.answered)


@contextmanager
def served(server: ReplayServer) -> Iterator[ReplayServer]:
    """Run the server on an event loop in a thread of its own, so that the agent may block this thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="lightning-replay", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def result_of(server: ReplayServer, outcome: Outcome | None = None, answered: Sequence[ToolEvent] = ()) -> ReplayResult:
    """Make the result of a replay from its server and the agent's outcome. `answered` are the tool runs that were answered from
    the record."""
    stopped = server.stopped or len(server.served) == server.until
    compared = outcome is not None and not stopped
    changes = _changes(server.recorded, outcome, server.divergences, answered) if outcome and compared else ()
    return ReplayResult(
        calls=len(server.recorded.calls),
        answered=len(server.served),
        missing=server.missing,
        divergences=tuple(server.divergences),
        changes=tuple(changes),
        outcome=outcome,
        stopped=stopped and not server.divergences,
        has_outcome=server.recorded.has_outcome,
    )


def _changes(
    recorded: RecordedRollout, outcome: Outcome, divergences: Sequence[Divergence], answered: Sequence[ToolEvent]
) -> Iterator[str]:
    """Yield a sentence for each difference between an outcome and the recorded one. A failure of the agent after a divergence
    is left out, because it follows from that."""
    before = recorded.rollout
    if outcome.fault is not None and (before.reward is not None or not recorded.has_outcome):
        if not divergences and recorded.has_outcome:
            yield f"the agent failed, and was rewarded with {before.reward:g} when it was recorded: {outcome.error}"
        return
    if recorded.has_outcome and outcome.reward is not None:
        if before.reward is None and before.fault in (Fault.AGENT, Fault.POLICY):
            yield f"the agent was rewarded with {outcome.reward:g}, and failed when it was recorded: {before.error}"
            return
        if before.reward is not None and (outcome.reward, outcome.rewards) != (before.reward, dict(before.rewards)):
            was = f"{before.reward:g} {dict(before.rewards)}"
            yield f"the reward is {outcome.reward:g} {dict(outcome.rewards)}, and was {was}"
    given, gave = ([(step.name, step.value) for step in each.step_rewards] for each in (outcome, recorded))
    if sorted(given) != sorted(gave):
        yield f"the rewards of single calls are {given}, and were {gave}"
    ran, had = _tool_runs(outcome.tool_events, answered), _tool_runs(recorded.tool_events, answered)
    for name, arguments, status, output in dict.fromkeys((*(had - ran), *(ran - had))):
        run = (name, arguments, status, output)
        when = "more often when it was recorded" if had[run] > ran[run] else "more often now"
        yield f"the tool {name}({arguments[:120]}) gave {status} {output[:120]!r} {when}"


def _tool_runs(events: Sequence[ToolEvent], answered: Sequence[ToolEvent]) -> Counter[tuple[str, str, str, str]]:
    """Count runs of tools by name, arguments, status and result, without the runs that were answered from the record, whose
    results are equal."""
    left = Counter((event.name, _text(event.arguments)) for event in answered)
    found: Counter[tuple[str, str, str, str]] = Counter()
    for event in events:
        asked = (event.name, _text(event.arguments))
        if event.kind:
            continue  # no tool ran
        if left[asked]:
            left[asked] -= 1
        else:
            found[(*asked, event.status, event.output or event.error)] += 1
    return found


def _text(value: Json) -> str:
    return json.dumps(value, sort_keys=True)
