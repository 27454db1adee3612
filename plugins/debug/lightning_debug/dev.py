"""The dry run: run a few tasks without training, and report what lightning recorded and what would go wrong.

The invariant: the user's own code (an algorithm, a credit function, a loss) is called here, so that its errors do not appear
only after an evaluation and the first step of a training.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import lightning
from lightning.algorithms.protocol import Algorithm, SearchAlgorithm, head_of
from lightning.asyncio_utils import in_thread
from lightning.batch import Group, mask_of
from lightning.errors import ConfigError
from lightning.losses.protocol import Loss, StepLoss, TokenBatch, needs_reference, needs_top_logprobs
from lightning.plugins.attached_adapters import failed_adapter
from lightning.safe_text import counted
from lightning.terminal import Terminal
from lightning.trainer.algorithm import credit_of
from lightning.trainer.metrics import (
    CURE_OF_GREEDY,
    are_greedy,
    are_media,
    are_too_long,
    are_untrained,
    count_greedy,
    count_truncated,
    is_greedy,
    names_of,
    nothing_trained,
    said_reasons,
    untrained_reasons,
)
from lightning.trainer.plan import TRAIN, train_rollouts
from lightning.trainer.stack import Stack
from lightning.trainer.summary import Reporter, grouped, reason, said_parts
from lightning.trainer.training_data import all_rollouts, is_of_interest, load_groups
from lightning.types import TOO_LONG, Caller, CallStatus, Rollout, StepReward, Task, Transition
from lightning_harnesses.config import JUDGED, RuleConfig, RulesConfig, reason_of
from lightning_policies.config import PoliciesConfig, PolicyConfig
from rich.markup import escape
from rich.table import Table

from lightning_debug.call_advice import HIDDEN, hidden_tools
from lightning_debug.course_rules import CURE_OF_CUT_OFF, MANY_CUT_OFF
from lightning_debug.diagnosis import Attempted, Diagnosis
from lightning_debug.rules import diagnose

OURS: Final = Path(lightning.__file__).parent
"""The folder of the core package, to tell its code from the user's in a traceback."""
SHORTEST_TASK: Final = 24
"""Characters of a task that the table always shows."""
OTHER_COLUMNS: Final = 60
"""Characters of a line that the table's other columns take, about; the rest is the task's."""


@dataclass(frozen=True, slots=True)
class DevRow:
    """One dry rollout. `agents` counts the answered calls of each agent, `tools` the tool runs by `name:status`.

    `callers` are the callers of the answered calls, each once. `failed_adapters` are the adapters whose errors left calls
    without an agent's name. Of the trained calls, `constrained_calls` counts those sampled with penalties or under a mask (a
    grammar for strict tools or a format, top_p, ...) that is not known, `greedy_calls` those at temperature 0 (never among the
    former), and `truncated_calls` those cut off. `media_calls` are not trained only because of images, audio, video or files in
    their prompts. `too_long_calls` were refused because prompt and answer did not fit. `rewards` are the named parts of the
    reward, and `call_rewards` says what each call was given (`call 2 (solver): helpful 0.5`). `recorded` is the input of the
    rules.
    """

    task: str
    reward: float | None
    error: str
    seconds: float
    agents: dict[str, int]
    tools: dict[str, int]
    trained_calls: int
    prompt_tokens: int
    response_tokens: int
    calls_without_logprobs: int
    failed_adapters: tuple[str, ...] = ()
    constrained_calls: int = 0
    greedy_calls: int = 0
    truncated_calls: int = 0
    media_calls: int = 0
    too_long_calls: int = 0
    callers: tuple[Caller, ...] = ()
    rewards: dict[str, float] = field(default_factory=dict)
    call_rewards: tuple[str, ...] = ()
    recorded: Attempted = field(default=Attempted((), ()), repr=False)


@dataclass(frozen=True, slots=True)
class DevReport:
    """The result of a dry run. `problems` are sentences with the cure, empty if training can start; `hints` may be ignored.
    `rewards_differ` is False if all rewards were equal and the algorithm learns from differences."""

    rows: tuple[DevRow, ...]
    problems: tuple[str, ...]
    hints: tuple[str, ...] = ()
    rewards_differ: bool = True

    @property
    def ok(self) -> bool:
        """Whether training can start: there are no problems."""
        return not self.problems


async def dry_run(
    stack: Stack,
    tasks: Sequence[Task],
    train_agents: Sequence[str],
    algorithm: Algorithm | SearchAlgorithm,
    reporter: Reporter,
) -> DevReport:
    """Run each task once, sampled as in training (`trainer.eval_temperature` does not apply), show the report and return it.

    The first rollout ends before the others begin, so that a memory shared between rollouts shows up in their prompts. The
    first task is run twice if the user's own function compares rollouts (`needs_pair`).
    """
    run, attempts = stack.run.id, stack.config.runner.max_attempts
    planned = train_rollouts(run, 1, tasks[:1], 2 if needs_pair(algorithm) else 1, attempts)
    planned += train_rollouts(run, 1, tasks[1:], 1, attempts, first=1)
    reporter.phase("dry run", len(planned))
    await stack.execute(planned[:1], reporter.rollout)
    if planned[1:]:
        await stack.execute(planned[1:], reporter.rollout)
    rollouts = await all_rollouts(stack.store, stack.run.id, split=TRAIN, step=1)
    rows = tuple([await _row(stack, rollout, train_agents) for rollout in rollouts])
    compared = not isinstance(algorithm, SearchAlgorithm) and algorithm.group_size > 1
    groups = await load_groups(stack.store, rollouts, train_agents, stack.config.trainer.policy_fault)
    tried = await in_thread(try_algorithm, algorithm, groups)
    policies = PoliciesConfig.of(stack.config).by_name
    problems = _problems(rows, train_agents, policies, compared=compared) + tried.problems
    if hidden := await hidden_tools(stack.gateway.parts):
        problems.append(f"{counted(hidden, 'call')}: {HIDDEN}")
    alike = equal_rewards(rows) if compared else ""
    of_rules = said_of_rules(rows, RulesConfig.of(stack.config).by_name)
    hints = [*([alike] if alike else []), *_hints(rows, train_agents, policies), *of_rules, *tried.hints]
    report = DevReport(rows, tuple(problems), tuple(hints), rewards_differ=not alike)
    show(report, reporter.console)
    return report


async def _row(stack: Stack, rollout: Rollout, train_agents: Sequence[str]) -> DevRow:
    recorded = await stack.store.transitions(rollout.id)
    calls = [call for call in recorded if call.status.answered]
    (attempt,) = await stack.store.attempts_of([(rollout.id, None)])
    events = attempt.tool_events
    wanted = [call for call in calls if is_of_interest(call, train_agents)]
    trained = [call for call in wanted if call.status is CallStatus.OK]
    return DevRow(
        task=str(rollout.task.input)[:80],
        reward=rollout.reward,
        error=rollout.error,
        seconds=rollout.seconds,
        agents=dict(Counter(call.caller.name for call in calls)),
        tools=dict(Counter(f"{event.name}:{event.status}" for event in events)),
        trained_calls=len(trained),
        prompt_tokens=sum(len(call.prompt_ids) for call in calls),
        response_tokens=sum(len(call.response_ids) for call in calls),
        calls_without_logprobs=sum(not call.logprobs for call in calls),
        failed_adapters=tuple(sorted({name for call in calls if (name := failed_adapter(call.caller))})),
        constrained_calls=sum(call.constrained and not is_greedy(call) and mask_of(call) is None for call in trained),
        greedy_calls=count_greedy(trained),
        truncated_calls=count_truncated(trained),
        media_calls=len(wanted) - len(trained),
        too_long_calls=sum(call.finish_reason == TOO_LONG for call in recorded),
        callers=tuple(dict.fromkeys(Caller(call.caller.agent, call.caller.path) for call in calls)),
        rewards=dict(rollout.rewards),
        call_rewards=tuple(_call_rewards(recorded, attempt.step_rewards)),
        recorded=Attempted(recorded, events),
    )


def _call_rewards(calls: Sequence[Transition], given: Sequence[StepReward]) -> Iterator[str]:
    """Yield a text for each step reward with the call that it was given to. Calls are counted from 1, in the order of their
    start."""
    own = [call for call in sorted(calls, key=lambda call: call.seq) if call.choice == 0]
    places = {call.id: f"call {place} ({call.caller.name})" for place, call in enumerate(own, 1)}
    for reward in given:
        yield f"{places.get(reward.response_id, 'no call known')}: {reward.name} {reward.value:.3g}"


def _problems(
    rows: Sequence[DevRow],
    train_agents: Sequence[str],
    policies: Mapping[str, PolicyConfig] | None = None,
    *,
    compared: bool = True,
) -> list[str]:
    """Return the problems that dry rollouts show. `policies` are those of a run with several, by name. `compared` says that the
    algorithm compares the rollouts of a task, so that sampling at temperature 0 is a problem."""
    failed = [row for row in rows if row.reward is None]
    problems = [
        f"{count} of {counted(len(rows), 'rollout')} failed: {why} (the first: task "
        f"{next(row.task for row in failed if reason(row.error) == why)!r})"
        for count, why in grouped(row.error for row in failed)
    ]
    scored = [row for row in rows if row.reward is not None]
    callers = [caller for row in rows for caller in row.callers]
    media = sum(row.media_calls for row in scored)
    if media and not any(row.trained_calls for row in scored):
        problems.append(are_media(media, media))
    elif scored and not any(row.trained_calls for row in scored):
        marked = untrained_reasons(call for row in scored for call in row.recorded.calls if call.status.answered)
        problems.append(are_untrained(marked) if marked else nothing_trained(callers, train_agents))
    greedy, trained = sum(row.greedy_calls for row in rows), sum(row.trained_calls for row in rows)
    if compared and are_greedy(greedy, trained):
        problems.append(f"{greedy} of {trained} trained calls were sampled at temperature 0: {CURE_OF_GREEDY}")
    problems += [
        f"the adapter {name} failed, so calls of its framework go without their agents' names: the log says how. "
        f"Repair it, or name the adapters to use (runner.adapters) without it"
        for name in sorted({name for row in rows for name in row.failed_adapters})
    ]
    if any(row.calls_without_logprobs for row in scored):
        problems.append("some calls came back without logprobs: the policy server must run with logprobs enabled")
    return problems + [found.text for found in _diagnosed(rows, train_agents, policies) if found.serious]


def _diagnosed(
    rows: Sequence[DevRow], train_agents: Sequence[str], policies: Mapping[str, PolicyConfig] | None
) -> list[Diagnosis]:
    failures = [row.error for row in rows if row.reward is None]
    return diagnose((row.recorded for row in rows), train_agents, failures, policies=policies)


def equal_rewards(rows: Sequence[DevRow]) -> str:
    """Say that all rewards of dry rollouts are equal and what to do; "" if two differ, or fewer than two are known."""
    rewards = [row.reward for row in rows if row.reward is not None]
    if len(rewards) < 2 or len(set(rewards)) > 1:
        return ""
    (value,) = set(rewards)
    return (
        f"All {len(rewards)} rewards were {value:.3g}. Training learns from differences between the rewards of one task's "
        "rollouts, so nothing can be learned from rewards like these. Give the reward function a right and a wrong answer "
        "yourself: it must tell them apart. If it does, take tasks that this model solves now and then, reward parts of an "
        "answer, or take another model"
    )


def _hints(
    rows: Sequence[DevRow], train_agents: Sequence[str] = (), policies: Mapping[str, PolicyConfig] | None = None
) -> list[str]:
    masked, trained = sum(row.constrained_calls for row in rows), sum(row.trained_calls for row in rows)
    hints = []
    if too_long := sum(row.too_long_calls for row in rows):
        hints.append(are_too_long(too_long))
    if trained and (media := sum(row.media_calls for row in rows)):
        hints.append(are_media(media, media + trained))
    if masked:
        hints.append(
            f"{masked} of {trained} trained calls were sampled with penalties, or under a mask (strict tools, a response "
            "format, top_p, ...) that the policy server did not send. They are trained, but without a correction between "
            "sampler and trainer: leave penalties out, and let a vLLM of your own send masks (docs/gateway.md, Sampling masks)"
        )
    if (truncated := sum(row.truncated_calls for row in rows)) > MANY_CUT_OFF * trained:
        hints.append(f"{truncated} of {trained} trained calls were cut off (finish_reason length): {CURE_OF_CUT_OFF}")
    return hints + [found.text for found in _diagnosed(rows, train_agents, policies) if not found.serious]


def said_of_rules(rows: Sequence[DevRow], rules: Mapping[str, RuleConfig]) -> Iterator[str]:
    """Yield how many calls of dry rollouts are untrained, and each rule of the settings that matched no call. Calls that a rule
    judges at the end of the attempt have its reason as an extra."""
    calls = [call for row in rows for call in row.recorded.calls if call.status.answered]
    if found := untrained_reasons(calls):
        yield f"calls that are recorded and not trained: {said_reasons(found)}"
    reasons = {call.untrained for call in calls} | {call.extras.get(JUDGED, b"").decode() for call in calls}
    for name, rule in rules.items():
        if not rule.train and reason_of(name, rule) not in reasons:
            yield (
                f"the rule untrained.{name} matched no call: all its conditions must hold, and a call that the agent itself "
                f"marks has no rule. Agents seen: {names_of(call.caller for call in calls)}. Models that were asked for: "
                f"{names_of(call.requested_model for call in calls)}"
            )


def show(report: DevReport, console: Terminal) -> None:
    """Print the report: a table of rollouts, then problems and hints."""
    table = Table("task", "reward", title="dry run")
    for name in ("agents (calls)", "tools"):  # never cut: an agent's name is what `train_agents` takes
        table.add_column(name, no_wrap=True)
    table.add_column("tokens in/out")
    table.add_column("seconds")
    room = max(SHORTEST_TASK, console.width - OTHER_COLUMNS)
    for row in report.rows:
        table.add_row(
            escape(row.task if len(row.task) <= room else f"{row.task[: room - 1]}…"),
            "[red]failed" if row.reward is None else escape(_said_reward(row)),
            escape("\n".join(f"{agent} ({count})" for agent, count in row.agents.items())),
            escape("\n".join(f"{tool} ({count})" for tool, count in row.tools.items())),
            f"{row.prompt_tokens}/{row.response_tokens}",
            f"{row.seconds:.1f}",
        )
    console.print(table)
    for row in report.rows:
        if row.call_rewards:
            console.print(f"{escape(row.task)}: {escape(', '.join(row.call_rewards))}", highlight=False)
    for problem in report.problems:
        console.print(f"[red]{escape(problem)}", highlight=False)
    for hint in report.hints:
        console.print(f"[yellow]{escape(hint)}", highlight=False)
    if report.ok and report.rewards_differ:
        console.print("everything that training needs was recorded", highlight=False)
    elif report.ok:
        console.print("calls and rewards were recorded, but no two rewards differ", highlight=False)


def _said_reward(row: DevRow) -> str:
    parts = said_parts(row.rewards)
    return f"{row.reward:.3g}{f' ({parts})' if parts else ''}"


class Tried(NamedTuple):
    """The result of trying an algorithm, as sentences: `problems` would end a run, `hints` would not."""

    problems: list[str]
    hints: list[str]


def needs_pair(algorithm: Algorithm | SearchAlgorithm) -> bool:
    """Return whether a dry run needs two rollouts of one task, because the user's own algorithm or credit compares them."""
    return not isinstance(algorithm, SearchAlgorithm) and algorithm.group_size > 1 and _is_own(algorithm)


def try_algorithm(algorithm: Algorithm | SearchAlgorithm, groups: Sequence[Group]) -> Tried:
    """Make a batch of a dry run's groups, and call the loss of a user's algorithm on two tokens if torch is loaded anyway.

    A dry run has most tasks only once. If an algorithm that compares rollouts fails only on single ones, that is a hint.
    """
    recorded = [group for group in groups if group.trajectories]
    if isinstance(algorithm, SearchAlgorithm) or not recorded:
        return Tried([], [])
    if head_of(algorithm):
        untried = f"{_name(algorithm)} was not tried: it uses a critic's values, which come with training"
        return Tried([], [untried] if _is_own(algorithm) else [])
    compared = [group for group in recorded if algorithm.group_size == 1 or len(group.trajectories) > 1]
    batch, hints = None, []
    if compared:
        try:
            batch = algorithm.batch(compared)
        except Exception as error:  # noqa: BLE001 — a user's code: whatever it raises is what is to be reported
            return Tried([_problem(f"{_name(algorithm)} cannot make a batch of these rollouts", error)], [])
    if len(compared) < len(recorded):
        try:
            single = algorithm.batch(recorded)
        except Exception as error:  # noqa: BLE001 — as above
            hints.append(
                f"{_name(algorithm)} fails on a group of which only one rollout succeeded, and a run would end at the first: "
                f"leave such groups out ({_told(error)})"
            )
        else:
            batch = batch or single
    if batch and "torch" in sys.modules and _is_foreign(type(algorithm)):
        try:
            _call(batch.loss_for(algorithm))
        except Exception as error:  # noqa: BLE001 — as above
            return Tried([_problem(f"the loss of {_name(algorithm)} fails on two tokens", error)], hints)
    if needs_pair(algorithm) and not compared:
        hints.append(f"{_name(algorithm)} was tried on single rollouts only: no two of one task succeeded")
    return Tried([], hints)


def _call(loss: Loss) -> None:
    """Call a loss on two tokens as an engine does, and check that it has a gradient. A `StepLoss` is skipped, because it needs
    more than tokens."""
    if isinstance(loss, StepLoss):
        return
    import torch

    logprobs, ones = torch.tensor([-1.0, -2.0], requires_grad=True), torch.ones(2)
    most = torch.arange(needs_top_logprobs(loss)).repeat(2, 1)
    made = loss(
        TokenBatch(
            logprobs,
            old_logprobs=logprobs.detach().clone(),
            advantages=torch.tensor([1.0, -1.0]),
            weights=ones / 2,
            entropy=logprobs * -0.5,
            has_old=ones.bool(),
            versions=torch.zeros(2, dtype=torch.long),
            reference=logprobs.detach().clone() if needs_reference(loss) else None,
            top_logprobs=logprobs[:, None] - most if most.numel() else None,
            top_ids=most if most.numel() else None,
        )
    )
    if not made.loss.requires_grad:
        raise ConfigError("it has no gradient: it has to be made of tokens.logprobs, not detached")
    made.loss.backward()  # type: ignore[no-untyped-call]


def _is_own(algorithm: Algorithm) -> bool:
    """Return whether the algorithm or its credit function is the user's own."""
    return _is_foreign(type(algorithm)) or _is_foreign(credit_of(algorithm))


def _is_foreign(value: object) -> bool:
    return value is not None and not str(getattr(value, "__module__", "")).startswith(
        ("lightning.", "lightning_credits.")
    )


def _name(algorithm: Algorithm) -> str:
    credit = credit_of(algorithm)
    if not _is_foreign(credit):
        return f"the algorithm {algorithm.name}"
    return f"the algorithm {algorithm.name} with the credit function {getattr(credit, '__name__', repr(credit))}"


def _problem(what: str, error: Exception) -> str:
    return f"{what}, and a run would end at its first step: {_told(error)}"


def _told(error: Exception) -> str:
    """Return an error's text with the user's own line: the last one in the file that lightning called."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(Path(frame.filename))]
    where = ""
    if frames:
        last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
        where = f" ({last.filename}:{last.lineno}, in {last.name}: {last.line})"
    return f"{type(error).__name__}: {error}{where}"


def _is_ours(file: Path) -> bool:
    return OURS in file.parents or file == Path(__file__)
