"""One run in a line: what it is, whether it goes on, what it earned and what is wrong with it.

The invariant: what a run's rows say is read again only when they can have changed: a run that has not takes two short reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePath
from typing import Final
from weakref import WeakKeyDictionary

from lightning.errors import LightningError, UnavailableError
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.epochs import is_over
from lightning.trainer.summary import Evaluation
from lightning.types import Json, Run, Status
from lightning_debug.advise import Alarm, Recorded, read_course, settings_of, urgency
from lightning_debug.diagnosis import Diagnosis
from lightning_debug.rules import diagnose
from lightning_debug.trends import failed_share

from lightning_console.places import key_of
from lightning_console.queries.state import State, state_of

ODD: Final = (LightningError, KeyError, TypeError, ValueError, AttributeError)
"""What reading a run of another release raises, or one that was made by hand."""
SPARK: Final = 48
"""Points of a small curve."""
BY_SEED: Final = ("seed", "tasks.train.mark", "forked_from")
"""What runs may differ in that differ in nothing but their seed: training tasks are often drawn by it."""
SHARE: Final = 20.0
"""A run that goes on is read again after so many times what reading it took."""
LEAST, MOST = 1.0, 30.0
"""Seconds after which a run that goes on, and one that stopped, is read again at the earliest and about."""


@dataclass(frozen=True, slots=True)
class About:
    """What a run's configuration says of it. `alike` is the same for runs that differ in nothing but their seed. `unread` says
    why it cannot be read, empty where it can."""

    model: str
    algorithm: str
    seed: int | None
    alike: str
    tasks: int
    held_out: int
    forked_from: str = ""
    unread: str = ""


@dataclass(frozen=True, slots=True)
class RunLine:
    """One run of a list. `rewards` are those of its steps with failed rollouts as 0, thinned; `reward` and
    `reward_with_failures` those of the last step. `before` and `after` are the first and the last held-out evaluation. `alarms`
    are what the rules say after the last step; `unread` says why the run could not be read whole, empty where it could."""

    key: str
    id: str
    store: str
    project: str
    created_at: float
    about: About
    state: State
    steps: int
    last: int | None
    last_at: float | None
    rollouts: int = 0
    failed: int = 0
    rewards: tuple[float | None, ...] = ()
    reward: float | None = None
    reward_with_failures: float | None = None
    failed_share: float | None = None
    before: Evaluation | None = None
    after: Evaluation | None = None
    alarms: tuple[Diagnosis, ...] = ()
    pruned: bool = False
    unread: str = ""


@dataclass
class _Known:
    """What is known of a run: its line, made at `at` with so much work (`took`, seconds); `over` as it was then."""

    line: RunLine
    over: bool
    until: float


_known: WeakKeyDictionary[Store, dict[str, _Known]] = WeakKeyDictionary()
_about: WeakKeyDictionary[Store, dict[tuple[str, float], About]] = WeakKeyDictionary()


def known_line(store: Store, run: Run, url: str) -> RunLine:
    """What is known of a run without reading: its line as it was, or its name."""
    found = _known.get(store, {}).get(run.id)
    if found is not None and found.line.created_at == run.created_at:
        return found.line
    return _nothing_known(run, url, "it is being read")


def _nothing_known(run: Run, url: str, why: str) -> RunLine:
    about = About("", "", None, "", 0, 0)
    return RunLine(key_of(run.id), run.id, url, run.project, run.created_at, about, State("unread", why), 0, None, None)


async def line_of(store: Store, run: Run, url: str) -> RunLine:
    """The line of a run (`run` may be brief). What is wrong with this run alone is said by `unread`. Raises `UnavailableError`
    where the store does not answer."""
    try:
        return await _line(store, run, url)
    except UnavailableError:
        raise
    except ODD as error:  # one run must not hide the others: its line says what is wrong
        line = _nothing_known(run, url, "it cannot be read")
        return replace(line, unread=said_of(error))


async def _line(store: Store, run: Run, url: str) -> RunLine:
    cache = _known.setdefault(store, {})
    known, over = cache.get(run.id), await is_over(store, run.id)
    if known is not None and known.line.created_at == run.created_at and known.over == over:
        after = -1 if known.line.last is None else known.line.last
        if (over or time.monotonic() < known.until) and not await store.steps(run.id, after=after, limit=1, brief=True):
            return known.line
    began = time.monotonic()
    line = await _read(store, run, url, over=over)
    took = time.monotonic() - began
    wait = max(LEAST, SHARE * took) if line.state.name == "running" else random.uniform(MOST, 2 * MOST)  # noqa: S311 — not all at once
    cache[run.id] = _Known(line, over, time.monotonic() + wait)
    return line


async def _read(store: Store, run: Run, url: str, *, over: bool) -> RunLine:
    """The line, as far as the run can be read: each part by itself."""
    line = _nothing_known(run, url, "it cannot be read")
    wrong: list[str] = []

    async def read_whole() -> Run:  # a listing may leave the settings out
        return run if run.config else await store.get_run(run.id) or run

    async def state(line: RunLine) -> RunLine:
        last = await store.last_step(run.id)
        recent = await store.steps(run.id, after=last.step - 20, brief=True) if last else []
        steps = [(record.step, record.at) for record in recent]
        line = replace(line, last=last.step if last else None, last_at=last.at if last else None)
        return replace(line, state=await state_of(store, await read_whole(), url, over=over, steps=steps))

    async def about(line: RunLine) -> RunLine:
        return replace(line, about=await about_of(store, run))

    async def counts(line: RunLine) -> RunLine:
        states: Counter[Status] = Counter()
        for counted in await store.count_rollouts(run.id):
            states[counted.status] += counted.rollouts
        return replace(line, rollouts=sum(states.values()), failed=states[Status.FAILED])

    async def pruned(line: RunLine) -> RunLine:
        return replace(line, pruned=isinstance(await store.get_state(run.id, PRUNED), Mapping))

    async def course(line: RunLine) -> RunLine:
        return _with_course(line, await read_course(store, await read_whole()))

    for part in (state, about, counts, pruned, course):
        try:
            line = await part(line)
        except UnavailableError:
            raise
        except ODD as error:  # the rest of it is shown
            wrong.append(said_of(error))
    return replace(line, unread="; ".join(dict.fromkeys(filter(None, [line.about.unread, *wrong]))))


def said_of(error: Exception) -> str:
    """What is wrong with a run's record, in words."""
    if isinstance(error, LightningError):
        return str(error)
    return f"its record cannot be read by this release: {type(error).__name__}: {error}"


def _with_course(line: RunLine, recorded: Recorded) -> RunLine:
    """The line with what the course of the run says."""
    steps = recorded.steps
    rewards = [_finite(metrics.get("reward_with_failures", metrics.get("reward"))) for metrics in steps]
    held_out = measured(recorded.evaluations)
    found = diagnose(course=recorded.after(len(steps))) if steps else []
    last = steps[-1] if steps else {}
    return replace(
        line,
        steps=len(steps),
        rewards=tuple(thinned(rewards, SPARK)),
        reward=_finite(last.get("reward")),
        reward_with_failures=rewards[-1] if rewards else None,
        failed_share=failed_share(last),
        before=held_out[0] if held_out else None,
        after=held_out[-1] if len(held_out) > 1 else None,
        alarms=tuple(
            sorted((each for each in found if not each.minor), key=lambda each: urgency(Alarm(each, None, True)))
        ),
    )


def measured(found: Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """The evaluations that say something: of one whose rollouts were neither scored nor failed nothing is known."""
    return tuple(each for each in found if each.known)


def _finite(value: float | None) -> float | None:
    """A metric that can be shown. Raises `TypeError` for what is no number."""
    return value if value is not None and math.isfinite(value) else None


def thinned(values: Sequence[float | None], most: int) -> list[float | None]:
    """At most `most` of the values, in order: means of windows; None where no value of a window is known."""
    if len(values) <= most:
        return list(values)
    ends = [round(place * len(values) / most) for place in range(most + 1)]
    windows = ([value for value in values[a:b] if value is not None] for a, b in pairwise(ends))
    return [sum(known) / len(known) if known else None for known in windows]


async def about_of(store: Store, run: Run) -> About:
    """What a run's configuration says; it never changes, and is read once. Raises `StoreError`."""
    cache = _about.setdefault(store, {})
    key = (run.id, run.created_at)
    if key not in cache:
        whole = run if run.config else await store.get_run(run.id)
        try:
            cache[key] = _about_of(whole.config if whole else {})
        except ODD as error:
            cache[key] = About("", "", None, f"{run.id}, which cannot be read", 0, 0, unread=said_of(error))
    return cache[key]


def _about_of(config: Mapping[str, Json]) -> About:
    algorithm, tasks = config.get("algorithm"), config.get("tasks")
    named = algorithm if isinstance(algorithm, Mapping) else {}
    arguments = named.get("arguments")
    level = arguments.get("low_level") if isinstance(arguments, Mapping) else None
    seed = config.get("seed")
    counts = [
        len(found) if isinstance(tasks, Mapping) and isinstance(found := tasks.get(split), list | tuple) else 0
        for split in ("train", "val")
    ]
    return About(
        model=PurePath(str(config.get("model") or "")).name,
        algorithm=" ".join(str(part) for part in (named.get("name"), level) if part),
        seed=seed if isinstance(seed, int) else None,
        alike=digest_of({name: value for name, value in settings_and_tasks(config).items() if name not in BY_SEED}),
        tasks=counts[0],
        held_out=counts[1],
        forked_from=str(config.get("forked_from") or ""),
    )


def settings_and_tasks(config: Mapping[str, Json]) -> dict[str, Json]:
    """What decides what a run learns: its settings by name, its seed and model, and how many tasks it has, with marks of which
    they are."""
    tasks = config.get("tasks")
    found = {
        name: value for name, value in config.items() if name not in ("config", "algorithm", "tasks", "train_agents")
    }
    for split in ("train", "val"):
        own = tasks.get(split) if isinstance(tasks, Mapping) else None
        if isinstance(own, list | tuple):
            found |= {f"tasks.{split}": len(own), f"tasks.{split}.mark": digest_of(own)}
    return found | settings_of(config)


def chosen_settings(settings: Mapping[str, Json]) -> dict[str, tuple[Json, Json]]:
    """Of a run's `settings_and_tasks`: those that are not as this release has them by default, each with that default, and what
    has none (model, seed, tasks)."""
    level = settings.get("algorithm.arguments.low_level")
    named = {key: settings.get(f"algorithm.{key}") for key in ("name", "type")}
    usual = settings_of({"algorithm": {**named, "arguments": {} if level is None else {"low_level": level}}})
    found = {
        name: (value, usual.get(name))
        for name, value in settings.items()
        if value != usual.get(name) and value not in ("", [], ()) and not name.endswith((".mark", ".type"))
    }
    return dict(sorted(found.items(), key=lambda item: (item[0] in usual, item[0])))


def digest_of(value: Json) -> str:
    """A short mark of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]
