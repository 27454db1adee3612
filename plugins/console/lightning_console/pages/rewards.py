"""The reward page: how the reward and its parts are distributed, what they correlate with, and results of other graders."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from lightning.errors import LightningError
from lightning.store.protocol import Store
from lightning.trainer.plan import TRAIN
from lightning.trainer.training_data import all_rollouts
from lightning.types import Rollout, Run, Status, by_key
from lightning_debug.advise import Advice
from lightning_debug.regrade import BESIDES, STRONG, Regraded, explained_by, rank_correlation
from lightning_debug.rules import FOLLOWS_LENGTH
from lightning_debug.transcript import transcript_of
from lightning_record.exchanges import parents_of

from lightning_console.blocks import (
    Block,
    Cell,
    Chart,
    Column,
    Control,
    Controls,
    Fact,
    Facts,
    Link,
    Notice,
    Notices,
    Page,
    Series,
    Table,
)
from lightning_console.pages.words import (
    NONE,
    change,
    count,
    counted,
    in_short,
    inside,
    located,
    number,
    part_text,
    share,
    to,
    trail,
)
from lightning_console.places import Located, Places, folder_of
from lightning_console.queries.advice import advice_of
from lightning_console.queries.memo import Memo, apart, stamp_of
from lightning_console.router import Address

STEPS: Final = 24
"""Most steps whose rollouts are read, evenly over the run."""
CALLS: Final = 400
"""Most rollouts whose calls are read, evenly over the rollouts of those steps."""
BINS: Final = 20
TRIALS: Final = "reward-*.json"
"""Files in the run's folder with the output of `lightning reward try --json`."""
MOST_TRIALS: Final = 12
LARGEST: Final = 20_000_000
"""Most bytes of a file of `TRIALS`."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a number over the rollouts of a step: least, quartiles (`low`, `middle`, `high`), most, mean."""

    step: int
    count: int
    mean: float
    least: float
    low: float
    middle: float
    high: float
    most: float


@dataclass(frozen=True, slots=True)
class Measure:
    """The reward, or a named part of it, step by step. `first[i]` and `last[i]` count the rollouts in the first and the last
    third of the steps whose value lies from `edges[i]` to `edges[i + 1]`."""

    name: str
    steps: tuple[Spread, ...]
    edges: tuple[float, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Correlation:
    """The rank correlation of the reward with the quantity `name` over `rollouts` rollouts; None if either is constant. `part`
    says that the quantity is a named part of the reward."""

    name: str
    value: float | None
    rollouts: int
    part: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of another grader, as `lightning reward try --json` printed it: `graded` has its rewards by the rollout's id.
    `why` says why a file cannot be read; empty if it can."""

    file: str
    grader: str = ""
    before: float | None = None
    now: float | None = None
    rank_correlation: float | None = None
    reordered: int = 0
    groups: int = 0
    equal_before: float | None = None
    equal_now: float | None = None
    advantages: tuple[int, int, int] | None = None
    follows: Mapping[str, tuple[float | None, float | None]] | None = None
    warnings: tuple[str, ...] = ()
    why: str = ""
    graded: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that the file was given: NAME of `reward-NAME.json`."""
        return self.file.removeprefix("reward-").removesuffix(".json")


@dataclass(frozen=True, slots=True)
class Rewards:
    """A run's rewards over the steps that were read (`steps`, of `of_steps`). `explained` is each part's covariance with the
    reward, divided by the reward's variance: negative for a part that works against the others, whose sum then exceeds 1. It is
    empty if the reward is not the sum of its parts.
    `equal_groups` is the share of groups whose rewards are all equal. `unread` says why calls could not be read; empty if they
    could. `highest` is the rollout with the highest reward; None without one."""

    steps: tuple[int, ...]
    of_steps: int
    rollouts: int
    failed: int
    measures: tuple[Measure, ...]
    correlations: tuple[Correlation, ...]
    explained: Mapping[str, float]
    equal_groups: float | None
    unread: str = ""
    highest: Rollout | None = None


_memo: Memo[Rewards] = Memo(kept=16)


async def read_rewards(store: Store, run: Run) -> Rewards:
    """Return statistics of the rewards of a run's training rollouts, from at most `STEPS` of its steps. They are cached until
    the run changes, or longer if computing them was slow (`Memo`). Raises `StoreError`."""
    return await _memo.get(store, run.id, await stamp_of(store, run.id), lambda: apart(lambda: _read(store, run)))


async def _read(store: Store, run: Run) -> Rewards:
    last = await store.last_step(run.id)
    count = last.step if last else 1
    steps = sorted({round(place) for place in np.linspace(1, count, min(count, STEPS))})
    rollouts = [each for step in steps for each in await all_rollouts(store, run.id, split=TRAIN, step=step)]
    scored = [each for each in rollouts if each.reward is not None and each.status is Status.SUCCEEDED]
    names = sorted({name for each in scored for name in each.rewards} - {"reward"})
    measures = [_measure("reward", steps, scored), *(_measure(name, steps, scored) for name in names)]
    chosen = [scored[round(place)] for place in np.linspace(0, len(scored) - 1, min(len(scored), CALLS))]
    looked, unread = await _regraded(store, chosen)
    rewards = np.array([each.now for each in looked], dtype=np.float64)
    correlations = []
    for name in (*names, *(BESIDES if not unread else ())):
        values = [each.besides.get(name, each.parts.get(name)) for each in looked]
        known = [place for place, value in enumerate(values) if value is not None]
        other = np.array([values[place] for place in known], dtype=np.float64)
        correlations.append(
            Correlation(name, rank_correlation(other, rewards[known]) if known else None, len(known), name in names)
        )
    return Rewards(
        steps=tuple(steps),
        of_steps=count if last else 0,
        rollouts=len(rollouts),
        failed=sum(each.status is Status.FAILED for each in rollouts),
        measures=tuple(each for each in measures if each.steps),
        correlations=tuple(correlations),
        explained=explained_by(looked, rewards) if names else {},
        equal_groups=_equal(scored),
        unread=unread,
        highest=max(scored, key=lambda each: each.reward or 0.0, default=None),
    )


async def _regraded(store: Store, rollouts: Sequence[Rollout]) -> tuple[list[Regraded], str]:
    """Return the rollouts, with their recorded rewards as old and new, and the quantities that a reward should not follow
    (`BESIDES`, such as lengths); and why these are missing, if no rollout has stored calls."""
    attempts = [(rollout.id, rollout.attempt) for rollout in rollouts]
    calls, ended = await store.transitions_of(attempts), await store.attempts_of([*attempts])
    parents = await parents_of(store, rollouts, dict(zip(attempts, calls, strict=True)))
    found, without, why = [], 0, ""
    for rollout, own, attempt, parent in zip(rollouts, calls, ended, parents, strict=True):
        reward = rollout.reward or 0.0
        made = Regraded(rollout.id, rollout.step, None, "", reward, reward, rollout.rewards, {})
        try:
            seen = transcript_of(rollout, own, attempt.tool_events, parent)
        except LightningError as error:
            without, why = without + 1, why or str(error)
        else:
            without += not seen.calls
            made = replace(made, besides={name: read(seen) for name, read in BESIDES.items()} if seen.calls else {})
        found.append(made)
    why = why or "the calls of its rollouts are not in the store"
    return found, why if found and without == len(found) else ""


def _measure(name: str, steps: Sequence[int], rollouts: Sequence[Rollout]) -> Measure:
    values: dict[int, list[float]] = {step: [] for step in steps}
    for each in rollouts:
        value = each.reward if name == "reward" else each.rewards.get(name)
        if value is not None:
            values[each.step].append(value)
    known = {step: own for step, own in values.items() if own}
    spreads = []
    for step, own in known.items():
        least, low, middle, high, most = (float(each) for each in np.quantile(own, (0, 0.25, 0.5, 0.75, 1)))
        spreads.append(Spread(step, len(own), float(np.mean(own)), least, low, middle, high, most))
    if not spreads:
        return Measure(name, (), (), (), ())
    third = max(1, len(known) // 3)
    ordered = list(known.values())
    early, late = [v for own in ordered[:third] for v in own], [v for own in ordered[-third:] for v in own]
    least, most = min([*early, *late]), max([*early, *late])
    equal = most - least <= 1e-9 * max(1.0, abs(most))  # up to rounding: no bins fit between them
    edges = np.histogram_bin_edges([*early, *late], bins=BINS, range=(least - 0.5, most + 0.5) if equal else None)
    first, last = (np.histogram(own, edges)[0] for own in (early, late))
    return Measure(name, tuple(spreads), tuple(map(float, edges)), tuple(map(int, first)), tuple(map(int, last)))


def _equal(rollouts: Sequence[Rollout]) -> float | None:
    """Return the share of groups whose rewards are all equal, among groups of two or more; None if there is no such group."""
    several = [own for own in by_key(rollouts, lambda each: each.group).values() if len(own) > 1]
    equal = sum(len({each.reward or 0.0 for each in own}) == 1 for own in several)
    return equal / len(several) if several else None


def trials_of(found: Located) -> list[Trial]:
    """Read the results of `lightning reward try --json` from the files in the run's folder, the newest first."""
    folder = folder_of(found)
    if not folder:
        return []
    files = sorted(Path(folder).glob(TRIALS), key=lambda file: file.stat().st_mtime, reverse=True)
    return [_trial(file, file.stat().st_mtime_ns) for file in files[:MOST_TRIALS]]


@functools.lru_cache(maxsize=MOST_TRIALS)
def _trial(file: Path, _changed: int) -> Trial:
    """Read a file of `TRIALS`, again if it `_changed` (time in ns)."""
    try:
        if file.stat().st_size > LARGEST:
            return Trial(file.name, why=f"it has more than {LARGEST} bytes")
        found: dict[str, Any] = json.loads(file.read_text())
        given = found["rollouts"]
        return Trial(
            file=file.name,
            grader=str(found["grader"]),
            before=float(np.mean([each["before"] for each in given])) if given else None,
            now=float(np.mean([each["now"] for each in given])) if given else None,
            rank_correlation=found["rank_correlation"],
            reordered=len(found["reordered"]),
            groups=int(found["groups"]),
            equal_before=found["equal_before"],
            equal_now=found["equal_now"],
            advantages=tuple(found["advantages"]) if found["advantages"] else None,
            follows={str(name): (pair["before"], pair["now"]) for name, pair in found["follows"].items()},
            warnings=tuple(map(str, found["warnings"])),
            graded={str(each["rollout"]): float(each["now"]) for each in given},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Trial(
            file.name, why=f"it is not what `lightning reward try --json` prints ({type(error).__name__}: {error})"
        )


async def page(places: Places, address: Address) -> Page:
    """Make the page `rewards/KEY?measure=`, about the rewards of a run."""
    found = await located(places, address)
    rewards = await read_rewards(found.store, found.run)
    trials = trials_of(found)
    blocks: list[Block] = []
    alarm = await _length_alarm(places, found) if rewards.measures else ""
    if rewards.measures:
        chosen = next(
            (each for each in rewards.measures if each.name == address.option("measure")), rewards.measures[0]
        )
        choices = [(each.name, each.name) for each in rewards.measures]
        blocks = [
            *_answers(found, rewards, alarm or ""),
            _facts(rewards),
            Controls(str(address), [Control("measure", "distribution of", chosen.name, choices)]),
            _over_steps(found, rewards, chosen),
            *_distribution(found, chosen),
            _correlations(rewards),
        ]
    else:
        what = (
            f"{counted(rewards.rollouts, 'training rollout was', 'training rollouts were')} looked at, "
            f"{count(rewards.failed)} of them failed"
        )
        blocks = [Notices([Notice("no training rollout of this run has a reward", "muted", detail=what)])]
    blocks += _trials(found, trials)
    waits = alarm is None
    return Page(str(address), "Reward", blocks, trail(found), live=waits, partial=waits)


async def _length_alarm(places: Places, found: Located) -> str | None:
    """Return the first sentence of the alarm of a reward that follows length, which has its figures; empty if there is none,
    None if that is not known yet."""
    advice = await advice_of(places, found, places.patience)
    if advice is None:
        return None
    alarms = advice.alarms if isinstance(advice, Advice) else ()
    text = next((each.found.text for each in alarms if each.found.cause == FOLLOWS_LENGTH), "")
    return text.partition(". ")[0]


def _answers(found: Located, rewards: Rewards, alarm: str) -> list[Block]:
    """Say which quantity the reward follows most, with the `alarm` about its length, and which rollout earned the highest
    reward, with its parts."""
    known = sorted((each for each in rewards.correlations if each.value is not None), key=_strength, reverse=True)
    notices = []
    if known and _strength(known[0]) >= STRONG:
        first, *others = known
        text = f"The reward follows {_quantity(first)} most: rank correlation {first.value:+.2f}"
        rest = ", ".join(f"{_quantity(each)} {each.value:+.2f}" for each in others)
        others_ = [f"Others: {rest}"] if rest else []
        asks = [alarm] if alarm else [] if first.part else ["Does the task ask for this?"]
        notices.append(Notice(text, "warn" if alarm or not first.part else "", ". ".join([*asks, *others_])))
    elif alarm:
        notices.append(Notice(alarm, "warn"))
    if (best := rewards.highest) is not None:
        parts = ", ".join(part_text(name, value) for name, value in best.rewards.items() if name != "reward")
        text = f"The highest reward is {number(best.reward)}, of the rollout {inside(found, best.id)}"
        links = [
            Link("this rollout", to("rollout", found.key, best.id)),
            Link("its group", to("group", found.key, best.group)),
            Link("search rollouts by their reward", to("search", found.key)),
        ]
        notices.append(Notice(f"{text}: {parts}" if parts else text, links=links))
    if rewards.unread:
        notices.append(
            Notice(rewards.unread, "warn", detail="what the reward follows besides its parts cannot be said")
        )
    return in_short(notices)


def _strength(each: Correlation) -> float:
    return abs(each.value or 0.0)


def _quantity(each: Correlation) -> str:
    return f"its part {each.name}" if each.part else each.name


def _facts(rewards: Rewards) -> Facts:
    first, last = rewards.measures[0].steps[0], rewards.measures[0].steps[-1]
    facts = [
        Fact(
            "mean reward", change(first.mean, last.mean), f"steps {first.step} and {last.step}, without failed rollouts"
        ),
        Fact("rollouts", count(rewards.rollouts), f"{count(rewards.failed)} failed and have no reward"),
        Fact(
            "groups with equal rewards",
            share(rewards.equal_groups),
            "most algorithms learn nothing from them",
            "warn" if (rewards.equal_groups or 0.0) > 0.7 else "",
        ),
    ]
    follows = [
        (abs(each.value), each.value, each.name)
        for each in rewards.correlations
        if each.value is not None and (each.part or abs(each.value) >= STRONG)
    ]
    if follows:
        _, value, name = max(follows)
        hint = "of its parts, the length of answers and other quantities, the one with the strongest rank correlation"
        facts.append(Fact("the reward follows most", name, f"rank correlation {value:+.2f}", hint=hint))
    looked = f"{len(rewards.steps)} of {rewards.of_steps} steps were looked at"
    return Facts(facts, note=looked if len(rewards.steps) < rewards.of_steps else "")


def _over_steps(found: Located, rewards: Rewards, chosen: Measure) -> Chart:
    series = [
        Series(
            each.name,
            [[float(at.step), at.mean, *((at.low, at.high) if each is chosen else ())] for at in each.steps],
            to=[to("step", found.key, at.step) for at in each.steps],
            hints=[
                f"median {number(at.middle)}, from {number(at.least)} to {number(at.most)}, {counted(at.count, 'rollout')}"
                for at in each.steps
            ],
            dashed=each.name != "reward",
        )
        for each in rewards.measures
    ]
    return Chart(
        series,
        "step",
        "reward",
        whole=True,
        title="Over the steps",
        note=f"Means over the rollouts of each step. The band around {chosen.name} holds the middle half of the rollouts.",
    )


def _distribution(found: Located, chosen: Measure) -> list[Block]:
    middles = [(low + high) / 2 for low, high in pairwise(chosen.edges)]
    first, last = sum(chosen.first) or 1, sum(chosen.last) or 1
    several = len(chosen.steps) > 1
    series = [
        Series(
            "first third of the run" if several else "the step",
            [[x, n / first] for x, n in zip(middles, chosen.first, strict=True)],
        )
    ]
    if several:
        series.append(Series("last third", [[x, n / last] for x, n in zip(middles, chosen.last, strict=True)]))
    title = f"How {chosen.name} is spread"
    return [Chart(series, chosen.name, "share of the rollouts", kind="bar", bounds=(0.0, None), title=title)]


def _correlations(rewards: Rewards) -> Table:
    def row(each: Correlation) -> list[Cell]:
        strong = each.value is not None and abs(each.value) >= STRONG and "length" in each.name
        explained = rewards.explained.get(each.name) if each.part else None
        return [
            Cell(f"the part {each.name}" if each.part else each.name),
            Cell(
                "does not vary" if each.value is None else f"{each.value:+.2f}",
                tone="warn" if strong and not each.part else "",
            ),
            Cell(number(explained, 2)),
            Cell(count(each.rollouts)),
        ]

    return Table(
        [
            Column("quantity"),
            Column("rank correlation", "number", "from ±0.5 on it is worth a look"),
            Column(
                "explains",
                "number",
                "how much of the reward's differences come from this part (covariance with the reward, divided by the reward's "
                "variance): the values add up to 1; a part with more than 1 has others that work against it, and these are "
                "below 0. None if the reward is not the sum of its parts",
            ),
            Column("rollouts", "number"),
        ],
        [row(each) for each in rewards.correlations],
        title="What the reward follows",
        note="A reward should follow its parts, and not how long answers are.",
        empty="the reward has no named parts, and no calls are in the store",
    )


def _trials(found: Located, trials: list[Trial]) -> list[Block]:
    folder = folder_of(found)
    if not folder:
        text = "On the machine with the run's folder, lightning reward try grades these rollouts with another grader."
        return [Notices([Notice(text, "muted")], title="Try another reward")]
    place = shlex.quote(folder)
    command = f"lightning reward try MODULE:FUNCTION {place}"
    notices = [
        Notice(
            "Grade these rollouts again with another function. No agent runs, and nothing is changed.",
            commands=[command],
        ),
        Notice(
            "Keep the result in the run's folder as reward-NAME.json: this page then shows it beside the others.",
            commands=[f"{command} --json > {place}/reward-NAME.json"],
        ),
    ]
    notices += [Notice(f"{trial.file} cannot be shown", "warn", detail=trial.why) for trial in trials if trial.why]
    blocks: list[Block] = [Notices(notices, title="Try another reward")]
    known = [trial for trial in trials if not trial.why]
    return [*blocks, _side_by_side(known)] if known else blocks


def _side_by_side(trials: list[Trial]) -> Table:
    follows = list(dict.fromkeys(name for trial in trials for name in trial.follows or ()))
    one = trials[0]

    def advantages(trial: Trial) -> str:
        return (
            NONE
            if trial.advantages is None
            else f"{trial.advantages[1]} of {trial.advantages[0]} ({trial.advantages[2]} other sign)"
        )

    rows = [
        [Cell("mean reward"), Cell(number(one.before)), *(Cell(number(trial.now)) for trial in trials)],
        [
            Cell("rank correlation with the recorded one"),
            Cell(NONE),
            *(Cell(number(trial.rank_correlation)) for trial in trials),
        ],
        [
            Cell("groups in another order"),
            Cell(NONE),
            *(Cell(f"{trial.reordered} of {trial.groups}") for trial in trials),
        ],
        [
            Cell("groups with equal rewards"),
            Cell(share(one.equal_before)),
            *(Cell(share(trial.equal_now)) for trial in trials),
        ],
        [Cell("trained calls with another advantage"), Cell(NONE), *(Cell(advantages(trial)) for trial in trials)],
    ]
    for name in follows:
        pairs = [(trial.follows or {}).get(name, (None, None)) for trial in trials]
        rows.append(
            [
                Cell(f"correlation with {name}"),
                Cell(number(pairs[0][0], 2)),
                *(Cell(number(now, 2)) for _, now in pairs),
            ]
        )
    rows.append(
        [
            Cell("warnings"),
            Cell(""),
            *(Cell("; ".join(trial.warnings) or "none", tone="warn" if trial.warnings else "") for trial in trials),
        ]
    )
    columns = [
        Column(""),
        Column("recorded"),
        *(Column(trial.name, hint=trial.grader) for trial in trials),
    ]
    return Table(columns, rows, title="Graders side by side")
