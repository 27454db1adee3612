"""List the runs at a place, filtered and sorted, each with its state, rewards and alarms.

The invariant: a run or store that cannot be read is named and hides no other. A run is read again only when it can have
changed: an unchanged one takes two short reads, and a store whose file is unchanged takes none. A run is called running only
with evidence for it, because a trainer that is killed records no end.
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
from lightning.trainer.context import is_over
from lightning.trainer.plan import TRAIN, is_lost, newest_generation, of_generation
from lightning.trainer.summary import Evaluation, grouped
from lightning.types import Json, Run, Status
from lightning_debug.advise import Alarm, Recorded, read_course, settings_of, urgency
from lightning_debug.diagnosis import failed_share
from lightning_debug.rules import diagnose
from lightning_server.protocol import SESSION_OF

from lightning_console.places import Places, key_of

Name = Literal["running", "finished", "stopped", "failed", "session", "unread"]
STATES: Final[tuple[Name, ...]] = ("running", "finished", "stopped", "failed", "session")
"""The states of a run. A `session` has the calls to a served model, such as those of a chat. A run that is still being read,
or cannot be, has the state `unread`, which is not listed here."""
QUIET: Final = 300.0
"""Seconds without a new step after which a run counts as stopped if nothing else shows that it goes on, or five times its
longest recent step if that is more."""
LOCKS: Final = Path("/proc/locks")
MOUNTS: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class State:
    """The state of a run. `why` names the evidence for it."""

    name: Name
    why: str


async def state_of(store: Store, run: Run, url: str, *, over: bool, steps: Sequence[tuple[int, float]]) -> State:
    """Return the state of a run (`run` with its configuration). `steps` are number and time (Unix seconds) of its newest
    committed steps, in order; `over` says whether the store records its end (`lightning.trainer.context.is_over`)."""
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
    failed = [rollout.error for rollout in mine if rollout.status is Status.FAILED]
    if failed and is_lost(mine):
        return State("failed", f"all {len(failed)} rollouts of step {following} failed: {grouped(failed)[0][1]}")
    where = f"after step {steps[-1][0]}" if steps else "before its first step"
    return State(
        "stopped", f"it stopped {where}: it has written nothing for {said_seconds(quiet)}, and no end is recorded"
    )


def is_held(url: str) -> bool:
    """Return whether a trainer on this machine has locked the folder of a database. This takes no lock; it reads `LOCKS`."""
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
    """Return a file as `LOCKS` names it: `device:inode`. The device is the mount's, since `stat` gives another one for a Btrfs
    subvolume. Raises `OSError`."""
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
    """Format a duration in words: `4.2 s`, `12 min`, `3.5 h`, `400 days`."""
    value, unit = seconds, "s"
    for name, size in (("min", 60.0), ("h", 3600.0), ("days", 86400.0)):
        if seconds >= 2 * size:
            value, unit = seconds / size, name
    return f"{value:.1f} {unit}" if value < 100 and unit != "days" else f"{value:.0f} {unit}"


ODD: Final = (LightningError, KeyError, TypeError, ValueError, AttributeError)
"""Errors that reading a run of another release, or one that was edited by hand, may raise."""
POINTS: Final = 400
"""Most points of a curve; in a longer run a point stands for several steps and has their least and largest value."""
SPARK: Final = 48
"""Most points of a small curve in a table."""
BY_SEED: Final = ("seed", "tasks.train.mark", "forked_from")
"""Settings that may differ between runs that count as differing only in their seed: training tasks are often drawn by it."""
SHARE: Final = 20.0
"""A run that goes on is read again after this many times the time that reading it took."""
LEAST, MOST = 1.0, 30.0
"""Seconds until a run is read again: at least `LEAST` if it is running, else a random time from `MOST` to twice that."""


@dataclass(frozen=True, slots=True)
class About:
    """Facts from a run's configuration. `alike` is equal for runs that differ only in their seed. `tasks` and `held_out` count
    tasks. `unread` says why the configuration cannot be read; empty if it can."""

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
    """One run of a list. `last` is the number of its last step. `rewards` are those of its steps, failed rollouts as 0, thinned
    to a small curve; `reward` and `reward_with_failures` are the last step's. `before` and `after` are the first and the last
    held-out evaluation. `alarms` are those of the run's page if its rollouts were `looked` at, else what the rules find in its
    metrics after the last step. `unread` says why the run could not be read whole; empty if it could."""

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
    alarms: tuple[Alarm, ...] = ()
    looked: bool = False
    pruned: bool = False
    unread: str = ""


@dataclass
class _Known:
    """The kept line of a run. `over` says whether the run had ended when it was made; a run that has not ended is read again
    after `until` (monotonic seconds)."""

    line: RunLine
    over: bool
    until: float


_known: WeakKeyDictionary[Store, dict[str, _Known]] = WeakKeyDictionary()
_about: WeakKeyDictionary[Store, dict[tuple[str, float], About]] = WeakKeyDictionary()
_alarms: WeakKeyDictionary[Store, dict[tuple[str, float], tuple[Alarm, ...]]] = WeakKeyDictionary()


def keep_alarms(store: Store, run: Run, alarms: Sequence[Alarm]) -> None:
    """Keep the alarms of a run, found in its metrics and its rollouts, for its line in the list of runs."""
    _alarms.setdefault(store, {})[run.id, run.created_at] = tuple(alarms)


def _with_alarms(store: Store, line: RunLine) -> RunLine:
    known = _alarms.get(store, {}).get((line.id, line.created_at))
    return line if known is None else replace(line, alarms=known, looked=True)


def known_line(store: Store, run: Run, url: str) -> RunLine:
    """Return a run's line without reading the store: the kept one, or one with its id alone and the state `unread`."""
    found = _known.get(store, {}).get(run.id)
    if found is not None and found.line.created_at == run.created_at:
        return found.line
    return _nothing_known(run, url, "it is being read")


def _nothing_known(run: Run, url: str, why: str) -> RunLine:
    about = About("", "", None, "", 0, 0)
    return RunLine(key_of(run.id), run.id, url, run.project, run.created_at, about, State("unread", why), 0, None)


async def line_of(store: Store, run: Run, url: str) -> RunLine:
    """Return the line of a run (`run` may lack its configuration). An error of this run alone is in the line's `unread`. Raises
    `UnavailableError` if the store does not answer."""
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
    """Read the line of a run part by part; a part that fails is named in `unread`, and the others are kept."""
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
    """Say what is wrong with a run's record, from the error that reading it raised."""
    if isinstance(error, LightningError):
        return str(error)
    return f"its record cannot be read by this release: {type(error).__name__}: {error}"


def _with_course(line: RunLine, recorded: Recorded) -> RunLine:
    """Return the line with rewards, evaluations and alarms from the run's recorded course."""
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
        alarms=tuple(sorted((Alarm(each, None, still=True) for each in found if not each.minor), key=urgency)),
    )


def measured(found: Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """Return the evaluations that have a result: at least one of their rollouts was scored or failed."""
    return tuple(each for each in found if each.known)


def finite(value: float | None) -> float | None:
    """Return a metric if it is finite, else None. Raises `TypeError` if it is not a number."""
    return value if value is not None and math.isfinite(value) else None


def points_of(
    xs: Sequence[float], values: Sequence[float | None], most: int = POINTS
) -> tuple[list[list[float | None]], list[int]]:
    """Thin a curve to at most `most` points; return these and, for each, the index of a value that it stands for. A point is
    `[x, value]`, or `[x, mean, least, most]` if it stands for several values."""
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
    """Thin values to at most `most`: the mean of each window, in order; None if no value of a window is known."""
    return [point[1] for point in points_of(range(len(values)), values, most)[0]]


async def about_of(store: Store, run: Run) -> About:
    """Return the facts from a run's configuration, which never changes and is read once. Raises `StoreError`."""
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
    """Return the settings that decide the result of a run, by name: its settings, seed and model, the number of its tasks, and
    a short digest of them."""
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
    """Select from a run's `settings_and_tasks` those that differ from this release's defaults, as `(value, default)`. The
    default is None for those that have none (model, seed, tasks)."""
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
    """Return a short digest of a JSON value: 8 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]


LOOK: Final = 1000
"""Most runs of a store that are listed: the newest."""
AT_ONCE: Final = 8
"""Most stores that are read at the same time."""


@dataclass(frozen=True, slots=True)
class RunList:
    """One page of runs: `lines` are those from index `first` on of the `matched` runs; `total` counts all runs without
    sessions. `unreadable` has reasons by store, `left_out` the stores whose older runs are not listed. `reading` says that
    some stores are still being read."""

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
    "alarms": lambda line: (
        sum(each.found.serious and each.still for each in line.alarms),
        sum(each.still for each in line.alarms),
        len(line.alarms),
    ),
}
"""The sort keys of a list of runs, by name. A run whose key is None comes last."""


@dataclass
class _Look:
    """The progress of reading a store's list: its `runs`, then their `lines` (None until all are read), or `why` it cannot be
    read. `stamp` is its file's (`stamp_of_file`) when reading began."""

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
    """List the runs at a place: those with all words of `text` in their id, model, algorithm, store or project, and in `state`
    (empty: any but `session`); at most `limit` from index `first` on. Runs not read within the patience of the places appear
    with what was known before, or their id alone. Raises `ConfigError` if there is no such place."""
    looks = await _look(places)
    unreadable, left_out = dict(places.unreadable), []
    lines: list[RunLine] = []
    for url, (store, look) in looks.items():
        if look.why:
            unreadable[url] = look.why
        else:
            known = look.lines if look.lines is not None else [known_line(store, run, url) for run in look.runs]
            lines += [_with_alarms(store, line) for line in known]
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
    """Read the list of each store that may have changed, and return all as far as they were read within the patience of the
    places."""
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
    """Return whether the lines of a store can change only if its file does: none of its runs is running."""
    return look.lines is not None and all(line.state.name != "running" for line in look.lines)


def stamp_of_file(url: str) -> tuple[int, ...] | None:
    """Return a value that changes when a database's file is written; None for a store that is not a file on this machine."""
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
    """Sort the lines by the key named `sort`, newest first among equals; lines without that key come last."""
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
