"""The runs at a place, filtered and sorted, and each in a line: what it is, whether it goes on, what it earned, what is wrong.

The invariant: what cannot be read is named and hides nothing else. What a run's rows say is read again only when they can have
changed: a run that has not takes two short reads, and a store's file that is as it was none. A run is called running only where
something says so: its end is recorded when it comes to it, but nothing is when its trainer is killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Final, Literal
from weakref import WeakKeyDictionary

from lightning.errors import LightningError, UnavailableError
from lightning.store.protocol import PRUNED, Store
from lightning.store.url import parse
from lightning.trainer.epochs import is_over
from lightning.trainer.plan import TRAIN, is_lost, newest_generation, of_generation
from lightning.trainer.reasons import grouped
from lightning.trainer.summary import Evaluation
from lightning.types import Json, Run, Status
from lightning_debug.advise import Alarm, Recorded, read_course, settings_of, urgency
from lightning_debug.diagnosis import Diagnosis, failed_share
from lightning_debug.rules import diagnose
from lightning_server.protocol import SESSION_OF

from lightning_console.places import Places, key_of

Name = Literal["running", "finished", "stopped", "failed", "session", "unread"]
STATES: Final[tuple[Name, ...]] = ("running", "finished", "stopped", "failed", "session")
"""What a run can be. A `session` are calls of a model that was served, such as a chat's; `unread` is one that is being read."""
QUIET: Final = 300.0
"""Seconds for which a run may write nothing and still be taken to go on, where nothing else says it; five of its longest steps
where these are more."""
LOCKS: Final = Path("/proc/locks")
MOUNTS: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class State:
    """`why` says what it is known from."""

    name: Name
    why: str


async def state_of(store: Store, run: Run, url: str, *, over: bool, steps: Sequence[tuple[int, float]]) -> State:
    """The state of a run, which has its configuration. `steps` are number and time (Unix seconds) of its newest committed ones,
    in order; `over` is what the store says of its end (`lightning.trainer.epochs.is_over`)."""
    if SESSION_OF in run.config:
        return State("session", "calls of a model that was served; nothing was trained")
    if over:
        return State("finished", "it came to its end")
    if is_held(url):
        return State("running", "a trainer holds its folder")
    last = steps[-1][1] if steps else run.created_at
    walls = [after[1] - before[1] for before, after in pairwise(steps)]
    quiet = time.time() - last
    if quiet < max(QUIET, 5 * max(walls, default=0.0)):
        what = "committed a step" if steps else "began"
        return State("running", f"it {what} {max(0.0, quiet):.0f} s ago, and its end is not recorded")
    following = steps[-1][0] + 1 if steps else 1
    page = await store.list_rollouts(run.id, split=TRAIN, step=following)
    mine = of_generation(page.items, newest_generation(page.items))
    if mine and is_lost(mine):
        reasons = grouped(rollout.error for rollout in mine if rollout.status is Status.FAILED)
        return State("failed", f"all {len(mine)} rollouts of step {following} failed: {reasons[0][1]}")
    where = f"after step {steps[-1][0]}" if steps else "before its first step"
    return State(
        "stopped", f"it stopped {where}: it has written nothing for {said_seconds(quiet)}, and no end is recorded"
    )


def is_held(url: str) -> bool:
    """Whether a trainer of this machine holds the folder of a database. Nothing is locked to find it out."""
    if not url.startswith("sqlite:"):
        return False
    try:
        lines = LOCKS.read_text().splitlines()
        file = _in_locks(Path(parse(url).path).parent / ".lock")
    except OSError:
        return False  # no such file, or not Linux
    held = (line.split() for line in lines)
    return any(words[1] == "FLOCK" and words[5] == file for words in held if len(words) > 5)


def _in_locks(file: Path) -> str:
    """A file as `LOCKS` names it: device and inode. The device is that of the mount: of a subvolume of Btrfs `stat`
    tells another. Raises `OSError`."""
    opened = os.open(file, os.O_PATH)
    try:
        about = Path(f"/proc/self/fdinfo/{opened}").read_text().split()
        inode = os.fstat(opened).st_ino
    finally:
        os.close(opened)
    mount = about[about.index("mnt_id:") + 1]
    for line in MOUNTS.read_text().splitlines():
        number, _, device, *_ = line.split()
        if number == mount:
            major, minor = map(int, device.split(":"))
            return f"{major:02x}:{minor:02x}:{inode}"
    raise OSError(f"{MOUNTS} does not name the mount of {file}")


def said_seconds(seconds: float) -> str:
    """A duration in words: `4.2 s`, `12 min`, `3.5 h`, `400 days`."""
    value, unit = seconds, "s"
    for name, size in (("min", 60.0), ("h", 3600.0), ("days", 86400.0)):
        if seconds >= 2 * size:
            value, unit = seconds / size, name
    return f"{value:.1f} {unit}" if value < 100 and unit != "days" else f"{value:.0f} {unit}"


ODD: Final = (LightningError, KeyError, TypeError, ValueError, AttributeError)
"""What reading a run of another release raises, or one that was made by hand."""
POINTS: Final = 400
"""Points of a curve; of a longer run a point stands for several steps, with the least and the most of them."""
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
    return RunLine(key_of(run.id), run.id, url, run.project, run.created_at, about, State("unread", why), 0, None)


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
        after = known.line.last or 0
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
        line = replace(line, last=last.step if last else None)
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
    rewards = [finite(metrics.get("reward_with_failures", metrics.get("reward"))) for metrics in steps]
    held_out = measured(recorded.evaluations)
    found = diagnose(course=recorded.after(len(steps))) if steps else []
    last = steps[-1] if steps else {}
    return replace(
        line,
        steps=len(steps),
        rewards=tuple(thinned(rewards, SPARK)),
        reward=finite(last.get("reward")),
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


def finite(value: float | None) -> float | None:
    """A metric that can be shown. Raises `TypeError` for what is no number."""
    return value if value is not None and math.isfinite(value) else None


def points_of(
    xs: Sequence[float], values: Sequence[float | None], most: int = POINTS
) -> tuple[list[list[float | None]], list[int]]:
    """A curve of at most `most` points, and the index of the value that each stands for: with the least and the most of the
    values around it where it stands for several."""
    if len(values) <= most:
        return [[x, value] for x, value in zip(xs, values, strict=True)], list(range(len(values)))
    ends = [round(place * len(values) / most) for place in range(most + 1)]
    points: list[list[float | None]] = []
    places = []
    for first, end in pairwise(ends):
        known = [value for value in values[first:end] if value is not None]
        place = (first + end - 1) // 2
        mean = sum(known) / len(known) if known else None
        points.append([xs[place], mean, min(known, default=None), max(known, default=None)])
        places.append(place)
    return points, places


def thinned(values: Sequence[float | None], most: int) -> list[float | None]:
    """At most `most` of the values, in order: means of windows; None where no value of a window is known."""
    return [point[1] for point in points_of(range(len(values)), values, most)[0]]


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


LOOK: Final = 1000
"""Runs of a store that are listed, the newest."""
AT_ONCE: Final = 8
"""Stores that are read at a time."""


@dataclass(frozen=True, slots=True)
class RunList:
    """Runs from number `first` on of the `matched` ones of `total`. `unreadable` are reasons by store; `left_out` says of which
    stores older runs are not among them; `reading` that some are still being read."""

    lines: tuple[RunLine, ...]
    first: int
    matched: int
    total: int
    states: Mapping[str, int]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    reading: bool = False


ORDERS: Final[Mapping[str, Callable[[RunLine], object]]] = {
    "run": lambda line: line.id,
    "started": lambda line: line.created_at,
    "state": lambda line: line.state.name,
    "steps": lambda line: line.steps,
    "rollouts": lambda line: line.rollouts,
    "failed": lambda line: line.failed,
    "reward": lambda line: line.reward_with_failures,
    "held-out": lambda line: None if line.before is None else (line.after or line.before).score,
    "gain": lambda line: None if line.after is None or line.before is None else line.after.score - line.before.score,
    "alarms": lambda line: (sum(alarm.serious for alarm in line.alarms), len(line.alarms)),
}
"""What a list can be sorted by."""


@dataclass
class _Look:
    """What a look at a store finds: its runs, then their lines, or why it cannot be read. `stamp` is that of its file."""

    runs: list[Run] = field(default_factory=list)
    lines: list[RunLine] | None = None
    why: str = ""
    stamp: tuple[int, ...] | None = None


_looks: WeakKeyDictionary[Store, _Look] = WeakKeyDictionary()
_reading: dict[tuple[int, int], tuple[asyncio.Task[None], _Look]] = {}
_limits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def list_runs(
    places: Places,
    *,
    text: str = "",
    state: str = "",
    sort: str = "started",
    descending: bool = True,
    first: int = 0,
    limit: int = 100,
) -> RunList:
    """Runs at a place: those whose names, model or algorithm have the `text`, and which are in a `state` (empty: any but
    `session`); at most `limit` from number `first` on. Those that are not read after the patience of the places are there by
    their names. Raises `ConfigError` for a place that is none."""
    looks = await _look(places)
    unreadable, left_out = dict(places.unreadable), []
    lines: list[RunLine] = []
    for url, (store, look) in looks.items():
        if look.why:
            unreadable[url] = look.why
        else:
            lines += look.lines if look.lines is not None else [known_line(store, run, url) for run in look.runs]
            left_out += [url] if len(look.runs) == LOOK else []
    names = Counter(line.id for line in lines)
    lines = [replace(line, key=key_of(line.id, line.store if names[line.id] > 1 else "")) for line in lines]
    words = text.casefold().split()
    states: Counter[str] = Counter(line.state.name for line in lines)
    matched = [line for line in lines if _is_in(line, state) and _has(line, words)]
    return RunList(
        tuple(_sorted(matched, sort, descending)[first : first + limit]),
        first,
        len(matched),
        len(lines) - states["session"],
        dict(states),
        unreadable,
        tuple(left_out),
        any(look.lines is None and not look.why for _, look in looks.values()),
    )


async def _look(places: Places) -> dict[str, tuple[Store, _Look]]:
    """A look at each store, as far as it has come after the patience of the places."""
    loop, found, tasks = asyncio.get_running_loop(), {}, []
    limit = _limits.setdefault(loop, asyncio.Semaphore(AT_ONCE))
    for url, store in (await places.stores()).items():
        stamp = stamp_of_file(url)
        look = _looks.get(store)
        if look is None or stamp is None or look.stamp != stamp or not _is_settled(look):
            key = (id(loop), id(store))
            if key not in _reading:
                look = _Look(stamp=stamp)
                task = asyncio.create_task(_read_store(store, url, places.project, look, limit))
                _reading[key] = task, look
                task.add_done_callback(lambda _, key=key: _reading.pop(key, None))  # type: ignore[misc]
            task, look = _reading[key]
            tasks.append(task)
        found[url] = store, look
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=places.patience)
        for task in done:
            task.result()
    return found


async def _read_store(store: Store, url: str, project: str | None, look: _Look, limit: asyncio.Semaphore) -> None:
    async with limit:
        try:
            look.runs = await store.list_runs(project, limit=LOOK, brief=True)
            look.lines = [await line_of(store, run, url) for run in look.runs]
        except LightningError as error:
            look.why = str(error)
        else:
            _looks[store] = look


def _is_settled(look: _Look) -> bool:
    """Whether what was found can only change with the store."""
    return look.lines is not None and all(line.state.name != "running" for line in look.lines)


def stamp_of_file(url: str) -> tuple[int, ...] | None:
    """What changes when something is written into a database's file; None for a store that is no file of this machine."""
    if not url.startswith("sqlite:"):
        return None
    path = parse(url).path
    try:
        database = Path(path).stat()
    except OSError:
        return None
    try:
        log = Path(f"{path}-wal").stat()
    except OSError:
        return database.st_ino, database.st_size, database.st_mtime_ns, 0, 0
    return (database.st_ino, database.st_size, database.st_mtime_ns, log.st_size, log.st_mtime_ns if log.st_size else 0)


def _sorted(lines: Sequence[RunLine], sort: str, descending: bool) -> list[RunLine]:
    """The lines in an order; those that have nothing to be sorted by come last."""
    order = ORDERS.get(sort, ORDERS["started"])
    newest = sorted(lines, key=lambda line: line.created_at, reverse=True)
    known = [line for line in newest if order(line) is not None]
    known.sort(key=order, reverse=descending)  # type: ignore[arg-type]
    return [*known, *(line for line in newest if order(line) is None)]


def _is_in(line: RunLine, state: str) -> bool:
    return line.state.name == state if state else line.state.name != "session"


def _has(line: RunLine, words: Sequence[str]) -> bool:
    about = f"{line.id} {line.about.model} {line.about.algorithm} {line.store} {line.project}".casefold()
    return all(word in about for word in words)
