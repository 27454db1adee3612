"""The reward lab: how the reward and its parts are spread, what the reward follows, and what other graders would have given."""

from __future__ import annotations

import shlex
from itertools import pairwise

from lightning_debug.regrade import STRONG

from lightning_console.blocks import (
    Block,
    Cell,
    Chart,
    Column,
    Control,
    Controls,
    Fact,
    Facts,
    Notice,
    Notices,
    Page,
    Series,
    Table,
)
from lightning_console.pages.words import NONE, change, count, located, number, share, to, trail
from lightning_console.places import Located, Places
from lightning_console.queries.insight import folder_of
from lightning_console.queries.rewards import Correlation, Measure, Rewards, Trial, read_rewards, trials_of
from lightning_console.router import Address


async def page(places: Places, address: Address) -> Page:
    """`rewards/KEY?measure=`."""
    found = await located(places, address)
    rewards = await read_rewards(found.store, found.run)
    trials = trials_of(found)
    blocks: list[Block] = []
    if rewards.measures:
        chosen = next(
            (each for each in rewards.measures if each.name == address.option("measure")), rewards.measures[0]
        )
        choices = [(each.name, each.name) for each in rewards.measures]
        blocks = [
            *_warnings(rewards),
            _facts(rewards),
            Controls(str(address), [Control("measure", "distribution of", chosen.name, choices)]),
            _over_steps(found, rewards, chosen),
            *_distribution(found, chosen),
            _correlations(rewards),
        ]
    else:
        what = f"{count(rewards.rollouts)} training rollouts were looked at, {count(rewards.failed)} of them failed"
        blocks = [Notices([Notice("no training rollout of this run has a reward", "muted", detail=what)])]
    blocks += _trials(found, trials)
    return Page(str(address), "Reward", blocks, trail(found))


def _warnings(rewards: Rewards) -> list[Block]:
    notices = [
        Notice(
            f"the reward follows {each.name}: rank correlation {each.value:+.2f}",
            "warn" if "length" in each.name else "",
            detail="is this what the task asks for? Look at the rollouts that earned most and least",
        )
        for each in rewards.correlations
        if not each.part and each.value is not None and abs(each.value) >= STRONG
    ]
    if rewards.unread:
        notices.append(
            Notice(rewards.unread, "warn", detail="what the reward follows besides its parts cannot be said")
        )
    return [Notices(notices)] if notices else []


def _facts(rewards: Rewards) -> Facts:
    first, last = rewards.measures[0].steps[0], rewards.measures[0].steps[-1]
    main = max(rewards.explained, key=lambda name: rewards.explained[name], default="")
    facts = [
        Fact("mean reward", change(first.mean, last.mean), f"steps {first.step} and {last.step}, those that succeeded"),
        Fact("rollouts", count(rewards.rollouts), f"{count(rewards.failed)} failed and have no reward"),
        Fact(
            "groups with equal rewards",
            share(rewards.equal_groups),
            "most algorithms learn nothing from those",
            "warn" if (rewards.equal_groups or 0.0) > 0.7 else "",
        ),
    ]
    if main:
        facts.append(
            Fact(
                "the reward varies most with",
                main,
                f"{share(rewards.explained[main])} of its variance is covariance with this part",
                hint="beyond 100 % where other parts work against it",
            )
        )
    looked = f"{len(rewards.steps)} of {rewards.of_steps} steps were looked at"
    return Facts(facts, note=looked if len(rewards.steps) < rewards.of_steps else "")


def _over_steps(found: Located, rewards: Rewards, chosen: Measure) -> Chart:
    series = [
        Series(
            each.name,
            [[float(at.step), at.mean, *((at.low, at.high) if each is chosen else ())] for at in each.steps],
            to=[to("step", found.key, at.step) for at in each.steps],
            hints=[
                f"median {number(at.middle)}, from {number(at.least)} to {number(at.most)}, {at.count} rollouts"
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
        note=f"the means, that of {chosen.name} with the middle half of the rollouts",
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
            Cell(share(explained) if explained is not None else NONE),
            Cell(count(each.rollouts)),
        ]

    return Table(
        [
            Column("the reward and"),
            Column("rank correlation", "number", "Spearman's rho; from ±0.5 on it is worth a look"),
            Column(
                "share of covariance",
                "number",
                "the part's covariance with the reward, of the reward's variance: parts that add up to the reward have shares "
                "that add up to 100 %; one of them is beyond 100 % where others work against it, and those are below 0 %",
            ),
            Column("rollouts", "number"),
        ],
        [row(each) for each in rewards.correlations],
        title="What the reward follows",
        note="a reward should follow its parts, and not how long answers are",
        empty="the reward has no named parts, and no calls are in the store",
    )


def _trials(found: Located, trials: list[Trial]) -> list[Block]:
    folder = folder_of(found)
    if not folder:
        text = "another grader can be tried on these rollouts where the run's folder is: lightning reward try"
        return [Notices([Notice(text, "muted")], title="Try another reward")]
    place = shlex.quote(folder)
    command = f"lightning reward try MODULE:FUNCTION {place}"
    notices = [
        Notice(
            "grade these rollouts again with another function; nothing runs and nothing is changed", commands=[command]
        ),
        Notice(
            "keep what it says in the run's folder, as reward-NAME.json, and it stands here beside the others",
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
        *(Column(trial.file.removeprefix("reward-").removesuffix(".json"), hint=trial.grader) for trial in trials),
    ]
    return Table(columns, rows, title="Graders side by side")
