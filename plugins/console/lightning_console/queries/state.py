"""Whether a run goes on: what the store and the run's folder say of it.

The invariant: a run is called running only where something says so: its end is recorded when it comes to it, but nothing is
when its trainer is killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from lightning.store.protocol import Store
from lightning.store.url import parse
from lightning.trainer.plan import TRAIN, is_lost, newest_generation, of_generation
from lightning.trainer.reasons import grouped
from lightning.types import Run, Status
from lightning_server.protocol import SESSION_OF

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
    done = steps[-1][0] + 1 if steps else 0
    page = await store.list_rollouts(run.id, split=TRAIN, step=done)
    mine = of_generation(page.items, newest_generation(page.items))
    if mine and is_lost(mine):
        reasons = grouped(rollout.error for rollout in mine if rollout.status is Status.FAILED)
        why = f"all {len(mine)} rollouts of step {done} failed: {reasons[0][1]}"
        return State("failed", why)
    where = f"after step {done - 1}" if steps else "before its first step"
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
