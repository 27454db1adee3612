"""Predict which changes would make a profiled run faster and by how much, with the `--set` lines for them.

The invariant: every prediction says how it was made. Events of a known number are counted. Effects of waiting are simulated by
the planner, twice on the same recorded groups with the same costs, once as recorded and once changed; only the difference is
used, so that chance and errors of the calibration cancel. Every setting is valid for the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lightning.config import Config
from lightning.errors import DataError
from lightning.safe_text import counted
from lightning.types import Status
from lightning_planner.calibration import calibrate
from lightning_planner.costs import Agent, Costs, Schedule, Team
from lightning_planner.recorded import PHASES, Recorded, recorded_config
from lightning_planner.simulation import simulate

from lightning_debug.profile import MAX_CALLS, Profile, each_call, max_calls, policy_args, server_costs

STEPS = 24
"""Least number of steps to simulate, because a simulation starts with no rollouts running."""
LARGEST_BLOCK = 128
"""Tokens in a block of vLLM's prefix cache on a CPU; on a GPU a block has fewer."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The planner, calibrated on a run, to simulate changes. `teams` are the groups of the profiled steps. `tool_shares` has,
    for each of their agents, the share of tools in the time before each call and after the last one. `phases` is the share of
    the wall time that is simulated, `base` the simulated seconds of a step without a change."""

    recorded: Recorded
    costs: Costs
    teams: tuple[Team, ...]
    tool_shares: tuple[tuple[tuple[float, ...], ...], ...]
    phases: float
    base: float

    @classmethod
    def of(cls, profile: Profile) -> WhatIf | None:
        """Calibrate the planner on a profiled run; None if the run has too few data for it."""
        recorded = profile.recorded
        try:
            calibration = calibrate(recorded)
        except DataError:
            return None
        steps = {step.step for step in profile.steps}
        gaps = {id(one.recorded): one.gaps for one in profile.activities}
        chosen = [
            (team, tuple(gaps.get(id(one), ()) for one in group.rollouts))
            for team, group in zip(calibration.teams, recorded.groups, strict=True)
            if group.step in steps
        ]
        simulated = sum(step.seconds.get(phase, 0.0) for step in profile.steps for phase in PHASES)
        teams, shares = tuple(team for team, _ in chosen), tuple(share for _, share in chosen)
        one = cls(
            recorded,
            replace(calibration.costs, server=server_costs(recorded, calibration)),
            teams,
            shares,
            simulated / profile.seconds,
            0.0,
        )
        return replace(one, base=one._seconds(one.costs, teams)) if teams else None

    @property
    def rollouts_per_step(self) -> int:
        """The number of rollouts that a step needs."""
        return self.recorded.schedule.tasks_per_step * self.recorded.schedule.group_size

    def saves(
        self,
        *,
        concurrency: int | None = None,
        max_staleness: int | None = None,
        max_calls: int | None = None,
        tools: float = 1.0,
        code: float = 1.0,
        known: float | None = None,
    ) -> float:
        """Simulate a change and return the share of a step's wall time that it saves; negative if it costs time. `tools` and
        `code` are factors on the time of tools and of the agents' own code. `known` simulates a prefix cache that finds every
        token that vLLM has seen, compared with one that finds this share of the prompts' tokens."""
        now = self.recorded.schedule
        schedule = replace(
            now,
            concurrency=now.concurrency if concurrency is None else concurrency,
            max_staleness=now.max_staleness if max_staleness is None else max_staleness,
        )
        costs, teams, base = self.costs, self.teams, self.base
        if max_calls is not None:
            costs = replace(costs, server=replace(costs.server, max_calls=max_calls))
        if tools != 1.0 or code != 1.0:
            teams = tuple(
                replace(
                    team,
                    agents=tuple(
                        _faster(agent, gaps, tools, code) for agent, gaps in zip(team.agents, shares, strict=True)
                    ),
                )
                for team, shares in zip(teams, self.tool_shares, strict=True)
            )
        if known is not None:
            computing = each_call(self.recorded, lambda call: replace(call, fresh=round(call.prompt * (1 - known))))
            costs = replace(costs, server=calibrate(computing).costs.server)
            base = self._seconds(costs, tuple(_recomputed(team, known) for team in teams))
        return (1.0 - self._seconds(costs, teams, schedule) / base) * self.phases if base else 0.0

    def _seconds(self, costs: Costs, teams: Sequence[Team], schedule: Schedule | None = None) -> float:
        steps = max(STEPS, len(self.recorded.steps))
        simulated = simulate(replace(schedule or self.recorded.schedule, steps=steps), costs, itertools.cycle(teams))
        return simulated.mean(lambda step: step.total)


def _faster(agent: Agent, gaps: Sequence[float], tools: float, code: float) -> Agent:
    """Return an agent whose tools and code take `tools` and `code` times as long."""
    if not gaps:
        return agent
    factors = [share * tools + (1.0 - share) * code for share in gaps]
    calls = tuple(
        replace(call, wait=call.wait * factor, work=call.work * factor)
        for call, factor in zip(agent.calls, factors, strict=False)
    )
    return replace(agent, calls=calls, wait=agent.wait * factors[-1], work=agent.work * factors[-1])


def _recomputed(team: Team, known: float) -> Team:
    agents = tuple(
        replace(agent, calls=tuple(replace(call, fresh=round(call.prompt * (1 - known))) for call in agent.calls))
        for agent in team.agents
    )
    return replace(team, agents=agents)


WORTH = 0.03
"""The smallest saving that is reported, as a share."""
STEP, TOKEN = "step", "trained token"
"""The units of a saving: the wall time of a step, or the wall time for each trained token if the change alters how many tokens
a step trains."""
FASTER = 0.5
"""The factor on the time of slow tools and slow code that is simulated: a goal that a user may reach."""
TURNS = "sampling and training in turns"
OLDER = 0.5
"""The weight of the saving of `TURNS` in the order of helps: it costs older tokens, from which less is learned."""
REUSED = 16
"""The proposed number of rollouts for each process, if starting processes costs much."""
SMALL = 512
"""A micro-batch of up to this many tokens takes about as long as an empty one."""
MICROBATCH = 8192
WASTED = 0.5
"""Another choice of tasks is proposed only from this share of tokens in untrained groups on: where most groups teach, it made
held-out rewards worse (docs/benchmarks.md, "Which tasks a step takes")."""


@dataclass(frozen=True, slots=True)
class Help:
    """One change that would make a run faster. `settings` are for `--set`; empty if no setting makes the change. `saves` is the
    predicted saving as a share of the wall time of a step, or for each trained token (`of`); `how` says how it was predicted.
    `steps` and `rollouts` are the ones where the cost is largest."""

    cause: str
    text: str
    settings: tuple[str, ...]
    saves: float
    of: str
    how: str
    steps: tuple[int, ...]
    rollouts: tuple[str, ...] = ()


def find_helps(profile: Profile) -> list[Help]:
    """Find the changes that would save at least `WORTH`, the largest saving first; that of `TURNS` is ranked at `OLDER` times
    its saving. If the planner cannot be calibrated, only counted savings are returned."""
    config, what_if = recorded_config(profile.recorded.config), WhatIf.of(profile)
    counted = (_checkpoints, _evaluations, _processes, _microbatches, _rows, _recomputing, _update, _untaught)
    found = [help_ for rule in counted for help_ in rule(profile, config)]
    if what_if is not None:
        for rule in (_concurrency, _staleness, _queue, _tools, _agent_code, _prefixes):
            found += rule(profile, config, what_if)
    return sorted(
        (one for one in found if one.saves >= WORTH),
        key=lambda one: one.saves * (OLDER if one.cause == TURNS else 1.0),
        reverse=True,
    )


def _worst(profile: Profile, phase: str) -> tuple[int, ...]:
    most = sorted(profile.steps, key=lambda step: -step.seconds.get(phase, 0.0))
    return tuple(sorted(step.step for step in most[:3]))


def _last(profile: Profile) -> int:
    return profile.recorded.steps[-1].step


# counted ----------------------------------------------------------------------------------------------------------------
def _checkpoints(profile: Profile, config: Config) -> Iterable[Help]:
    every = config.trainer.checkpoint_every
    if every is None:
        return
    # The last step is always saved. A step waits for the checkpoint of the step before it.
    waits = {step.step: step.seconds.get("checkpoint", 0.0) for step in profile.steps if step.step != _last(profile)}
    fixed = min(waits.values(), default=0.0) if every > 1 else 0.0
    fewer = 10 * every
    saved = sum(max(0.0, wait - fixed) for step, wait in waits.items() if (step - 1) % fewer)
    yield Help(
        "checkpoints",
        f"a checkpoint after every {every} steps costs {saved / max(1, len(waits)):.2f} s of a step: write them less often",
        (f"trainer.checkpoint_every={fewer}",),
        saved / profile.seconds,
        STEP,
        "counted: the waiting for those checkpoints that would not be written",
        _worst(profile, "checkpoint"),
    )


def _evaluations(profile: Profile, config: Config) -> Iterable[Help]:
    every = config.trainer.eval_every
    took = {
        step.step: step.seconds["eval"]
        for step in profile.steps
        if step.step != _last(profile) and "eval" in step.seconds
    }
    if not every or not took:
        return
    for fewer in (2 * every, 5 * every, 10 * every):
        left = sum(seconds for step, seconds in took.items() if not step % fewer)
        if left < WORTH * profile.seconds:
            break
    mean = sum(took.values()) / len(took)
    yield Help(
        "evaluations",
        f"{counted(len(took), 'evaluation')} of {mean:.2f} s in {counted(len(profile.steps), 'step')}: evaluate "
        "less often, or on fewer tasks",
        (f"trainer.eval_every={fewer}",),
        (sum(took.values()) - left) / profile.seconds,
        STEP,
        "counted: the evaluations that would not be made",
        _worst(profile, "eval"),
    )


def _processes(profile: Profile, config: Config) -> Iterable[Help]:
    seconds, each = profile.parts["agent_start"], config.runner.rollouts_per_process
    if each >= REUSED or config.runner.concurrency >= len(profile.activities):
        return
    yield Help(
        "process start",
        f"steps wait {seconds / len(profile.steps):.2f} s for agents' processes to start, one for "
        f"{'each rollout' if each == 1 else f'every {each} rollouts'}: let a "
        "process run more, if your agent's modules keep nothing that another rollout must not see",
        (f"runner.rollouts_per_process={REUSED}",),
        seconds * (1 - each / REUSED) / profile.seconds,
        STEP,
        "measured: at most the time in which places were free and rollouts waited; less where all processors are busy",
        _worst(profile, "rollout"),
    )


def _microbatches(profile: Profile, config: Config) -> Iterable[Help]:
    budget = config.engine.tokens_per_microbatch
    parts = sum(step.metrics.get("microbatches", 0.0) for step in profile.steps)
    forward = sum(step.metrics.get("tokens_forward", 0.0) for step in profile.steps)
    if budget >= MICROBATCH or not parts or forward / parts > SMALL:
        return
    fewer = max(float(len(profile.steps)), parts * budget / MICROBATCH)
    yield Help(
        "micro-batches",
        f"training computes {forward / parts:.0f} tokens at a time, in {parts / len(profile.steps):.0f} micro-batches a step: "
        "take larger ones, as far as memory has room",
        (f"engine.tokens_per_microbatch={MICROBATCH}",),
        profile.parts["training"] * max(0.0, 1 - fewer / parts) / profile.seconds,
        STEP,
        f"assumed: a micro-batch of up to {SMALL} tokens takes as long as a small one",
        _worst(profile, "train"),
    )


def _rows(profile: Profile, config: Config) -> Iterable[Help]:
    forward = sum(step.metrics.get("tokens_forward", 0.0) for step in profile.steps)
    trained = [one.recorded for one in profile.activities if one.recorded.rows]
    unique = sum(call.fresh + call.response for one in trained for call in one.calls)
    if config.engine.step in ("auto", "tree") or not forward or unique >= forward:
        return
    yield Help(
        "tokens computed again",
        f"training computes {forward:.0f} tokens, of which {unique:.0f} differ (engine.step={config.engine.step}): compute "
        "what rows share once",
        ("engine.step=auto",),
        profile.parts["training"] * (1 - unique / forward) / profile.seconds,
        STEP,
        "counted: training is taken to last as long as it has tokens; the model has to support a tree",
        _worst(profile, "train"),
    )


def _recomputing(profile: Profile, config: Config) -> Iterable[Help]:
    if config.engine.gradient_checkpointing:
        yield Help(
            "gradient checkpointing",
            "activations are computed twice: keep them, if memory has room",
            ("engine.gradient_checkpointing=false",),
            profile.parts["training"] / 4 / profile.seconds,
            STEP,
            "assumed: the second forward pass is a quarter of the training",
            _worst(profile, "train"),
        )


def _update(profile: Profile, config: Config) -> Iterable[Help]:
    seconds, transfer = profile.parts["update"], config.policy_server.weight_transfer
    each = seconds / len(profile.steps)
    if transfer in ("file", "gloo") and not config.policy_server.is_elsewhere:
        yield Help(
            "weight update",
            f"an update of the policy server takes {each:.2f} s through {transfer}: let lightning choose the way",
            ("policy_server.weight_transfer=auto",),
            seconds / 2 / profile.seconds,
            STEP,
            "assumed: shared memory takes half as long",
            _worst(profile, "update"),
        )
        return
    tasks = 2 * config.trainer.tasks_per_step
    yield Help(
        "weight update",
        f"an update of the policy server takes {each:.2f} s whatever a step trains: train more rollouts a step, or adapters "
        "alone (engine.lora)",
        (f"trainer.tasks_per_step={tasks}",),
        seconds / 2 / profile.seconds,
        TOKEN,
        "counted: half as many updates for the same number of trained tokens",
        _worst(profile, "update"),
    )


def _untaught(profile: Profile, config: Config) -> Iterable[Help]:
    lost, sampled = sum(profile.tokens.untaught.values()), profile.tokens.sampled
    if not lost:
        return
    taught = profile.seconds - profile.parts["training"]
    trained = {key for record in profile.records for key in record.rollouts}
    taught_groups = {one.group for one in profile.rollouts if (one.id, one.attempt) in trained}
    untaught = [one for one in profile.rollouts if one.group not in taught_groups and one.status is Status.SUCCEEDED]
    reasons = ", ".join(f"{reason} {tokens}" for reason, tokens in profile.tokens.untaught.items())
    chosen = config.trainer.order == "learnable" or lost / sampled < WASTED
    ways = ["tasks that the policy solves sometimes"]
    if not profile.recorded.schedule.dynamic_sampling:
        ways.insert(0, "the algorithm dynamic_sampling=true")
    yield Help(
        "groups that teach nothing",
        f"{lost / sampled:.0%} of the sampled tokens are of groups that taught nothing ({reasons}): "
        + ("" if chosen else "sample the tasks that teach (held-out tasks say whether that helps), or ")
        + f"give {', or '.join(ways)}",
        () if chosen else ("trainer.order=learnable",),
        lost / sampled * taught / profile.seconds,
        TOKEN,
        "counted: at most, if every group taught",
        tuple(sorted({one.step for one in untaught})[:3]),
        tuple(one.id for one in untaught)[:3],
    )


# simulated --------------------------------------------------------------------------------------------------------------
SIMULATED = "simulated on the recorded groups"


def _cheapest(values: Sequence[int], saves: Callable[[int], float]) -> tuple[int, float]:
    """Return the first value that saves at least 90 % of the best saving, with its saving."""
    found = [(value, saves(value)) for value in values]
    best = max((saved for _, saved in found), default=0.0)
    return next(((value, saved) for value, saved in found if saved >= 0.9 * best), (0, 0.0))


def _concurrency(profile: Profile, config: Config, what_if: WhatIf) -> Iterable[Help]:
    now = config.runner.concurrency
    most = what_if.rollouts_per_step * (1 + config.trainer.max_staleness)
    values = sorted({value for value in (2 * now, 4 * now, 8 * now, most) if now < value <= most})
    if not values:
        return
    more, saved = _cheapest(values, lambda value: what_if.saves(concurrency=value))
    yield Help(
        "too few agents at once",
        f"{now} agents run at once, of {what_if.rollouts_per_step} rollouts a step: run more",
        (f"runner.concurrency={more}",),
        saved,
        STEP,
        SIMULATED + "; a policy server and machines under more load than was recorded are extrapolated",
        _worst(profile, "rollout"),
    )


def _staleness(profile: Profile, config: Config, what_if: WhatIf) -> Iterable[Help]:
    if config.trainer.max_staleness:
        return
    bound, saved = _cheapest((1, 2), lambda value: what_if.saves(max_staleness=value))
    waiting = sorted(profile.activities, key=lambda one: one.start - one.end)
    idle = profile.seconds - profile.waiting
    yield Help(
        TURNS,
        f"agents wait {idle / len(profile.steps):.2f} s of a step for the trainer, and {profile.places_idle:.0%} of the places "
        "are empty while it waits for them: go on sampling while it trains. It then learns from older tokens",
        (f"trainer.max_staleness={bound}",),
        saved,
        STEP,
        SIMULATED,
        _worst(profile, "rollout"),
        tuple(one.rollout for one in waiting[:3]),
    )


def _queue(profile: Profile, config: Config, what_if: WhatIf) -> Iterable[Help]:
    now = max_calls(profile.recorded)
    if now is None or not profile.parts["queue"]:
        return
    most = max(config.runner.concurrency, now + 1)
    yield Help(
        "queue in vLLM",
        f"vLLM runs {now} calls at once, and {config.runner.concurrency} agents call it: let it run more",
        (_with_args([*_without(policy_args(profile.recorded)), MAX_CALLS, str(most)]),),
        what_if.saves(max_calls=most),
        STEP,
        SIMULATED + "; calls in larger batches than were recorded are extrapolated",
        _worst(profile, "rollout"),
    )


def _without(args: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for argument in args:
        if skip:
            skip = False
        elif argument == MAX_CALLS:
            skip = True
        elif not argument.startswith(f"{MAX_CALLS}="):
            kept.append(argument)
    return kept


def _with_args(args: Sequence[str]) -> str:
    quoted = ", ".join('"' + argument.replace("\\", "\\\\").replace('"', '\\"') + '"' for argument in args)
    return f"policy_server.args=[{quoted}]"


def _tools(profile: Profile, config: Config, what_if: WhatIf) -> Iterable[Help]:
    slowest = sorted(profile.activities, key=lambda one: -sum(one.tools.values()))
    name, seconds = next(iter(profile.tools.items()), ("", 0.0))
    which = f", the most of it in {name} ({seconds / len(profile.activities):.2f} s a rollout)" if name else ""
    yield Help(
        "slow tools",
        f"steps wait {profile.parts['tools'] / len(profile.steps):.2f} s for tools{which}: make them faster, ask them less "
        "often, or cache what they answer. No setting does that",
        (),
        what_if.saves(tools=FASTER),
        STEP,
        SIMULATED + ", with tools that take half as long",
        _worst(profile, "rollout"),
        tuple(one.rollout for one in slowest[:3]),
    )


def _agent_code(profile: Profile, config: Config, what_if: WhatIf) -> Iterable[Help]:
    def own(one_of: int) -> float:
        one = profile.activities[one_of]
        return sum(interval.end - interval.begin for interval in one.intervals if interval.state == "agent_code")

    slowest = sorted(range(len(profile.activities)), key=lambda at: -own(at))
    yield Help(
        "slow agent code",
        f"steps wait {profile.parts['agent_code'] / len(profile.steps):.2f} s for the agent's own code, outside of calls and "
        "tools: profile it (py-spy); what it does once for every rollout may be done once for a module "
        "(runner.rollouts_per_process)",
        (),
        what_if.saves(code=FASTER),
        STEP,
        SIMULATED + ", with code that takes half as long",
        _worst(profile, "rollout"),
        tuple(profile.activities[at].rollout for at in slowest[:3]),
    )


def block_of(args: Sequence[str]) -> int:
    """Return how many tokens a block of vLLM's prefix cache has, by its arguments. Only whole blocks are found again. Without
    `--block-size` it is the largest of vLLM's defaults, that of CPUs: less may be found than with the smaller blocks of a GPU,
    never more."""
    for place, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        value = value if equals else "".join(args[place + 1 : place + 2])
        if name == "--block-size" and value.isdecimal() and int(value):
            return int(value)
    return LARGEST_BLOCK


def _prefixes(profile: Profile, config: Config, what_if: WhatIf) -> Iterable[Help]:
    off = "--no-enable-prefix-caching"
    args = policy_args(profile.recorded)
    if profile.tokens.cached is None or not profile.tokens.prompt:
        return
    found = profile.tokens.cached / profile.tokens.prompt
    calls = [call for one in profile.activities for call in one.recorded.calls]
    block = block_of(args)
    possible = sum((call.prompt - call.fresh) // block * block for call in calls) / sum(call.prompt for call in calls)
    if possible - found < 0.2:
        return
    yield Help(
        "prompts computed again",
        f"vLLM finds {found:.0%} of the prompts' tokens in its prefix cache, and {possible:.0%} could be found, since earlier "
        f"prompts began with them in whole blocks of {block} tokens: "
        + (
            "switch it on"
            if off in args
            else "give it more room (policy_server.kv_cache_bytes, gpu_memory_utilization)"
        ),
        (_with_args([argument for argument in args if argument != off]),) if off in args else (),
        what_if.saves(known=found),
        STEP,
        SIMULATED,
        _worst(profile, "rollout"),
    )
