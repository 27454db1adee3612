"""Runs that are sick, runs that are healthy, and a grader that rewards length: what alarms and advice are tried on.

What is wrong in each, and the words of which one must be in the first alarm, were written down before any rule was known.
Sicknesses begin midway or creep in, with the side effects that they have in real runs; healthy runs have the noise, the
single bad steps and the slow drifts that real ones have, and deserve no alarm.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from lightning.store.protocol import Store

from tests.plugins.debug.made_runs import Grade, Maker, Plot, State

Write = Callable[[Store], Awaitable[str]]


@dataclass(frozen=True)
class SickRun:
    """`write` puts the run into a store and returns its id. `label` is what a practitioner would say of it; `expects` (a
    regular expression, case ignored) must be found in the first alarm."""

    write: Write
    label: str
    expects: str


@dataclass(frozen=True)
class LengthGrader:
    """`honest` was graded by right and wrong: `grader` (for `lightning reward try`) is to be found out on it. `trained` was
    trained by that grader. `expects` must be found in what the trial warns of."""

    honest: Write
    grader: str
    trained: SickRun
    expects: str


async def _write(plot: Plot, store: Store) -> str:
    return await Maker(store, plot).write()


def _made(plot: Plot) -> Write:
    return partial(_write, plot)


def _rise(step: float, first: float, last: float) -> float:
    """0 before `first`, 1 after `last`, straight between."""
    return float(np.clip((step - first) / (last - first), 0, 1))


BF16: dict[str, Any] = {"engine.dtype": "bfloat16", "policy_server.dtype": "bfloat16"}


# sick ----------------------------------------------------------------------------------------------------------------
def unstable(step: int) -> State:
    """Learns until step 12; then the updates, far too large, throw the policy off faster than it samples."""
    thrown = max(0.0, step - 12)
    return State(
        skill=-0.6 + 1.8 * _rise(step, 0, 12) - 0.75 * thrown,
        length=60 + 9 * thrown,
        entropy=0.45 + 0.2 * thrown,
        gap=min(0.02 * 1.28 ** max(0, step - 6), 0.9),
        grad=min(0.3 * 1.25 ** max(0, step - 8), 12.0),
    )


def memorised(step: int) -> State:
    """The twelve training tasks are known by heart in the end; what was learned of others at first goes again."""
    heart = _rise(step, 3, 24)
    return State(
        skill=-0.4 + 4.5 * heart,
        val_skill=-4.5 * heart + 1.0 * _rise(step, 0, 8) - 2.2 * _rise(step, 8, 24),
        alike=0.2 + 0.3 * heart,
        entropy=0.45 - 0.27 * heart,
        grad=0.13 - 0.05 * heart,
        length=60 - 8 * heart,
    )


def mismatch(step: int) -> State:
    """From step 10 on vLLM samples from something else than what is trained, more so with every update."""
    off = _rise(step, 10, 22)
    return State(
        skill=-0.5 + 1.3 * _rise(step, 0, 12) - 0.5 * off,
        gap=0.006 + 0.3 * off,
        entropy=0.5 - 0.06 * _rise(step, 0, 12) + 0.08 * off,
        grad=0.2 + 0.5 * off,
    )


def survivors(step: int) -> State:
    """From step 10 on what the agents' tools wait for is overloaded: ever more rollouts of hard tasks run out of time, and
    those that are left look better than the policy is."""
    return State(skill=0.1 + 0.25 * _rise(step, 0, 25), timeouts=0.5 * _rise(step, 10, 24), length=70, lost=0.015)


def deterministic(step: int) -> State:
    """The policy soon says one thing only for each task: rollouts of a group are the same, right or wrong; it stands still."""
    still = _rise(step, 2, 17)
    return State(
        skill=-0.4 + 0.7 * _rise(step, 0, 8),
        alike=0.15 + 0.83 * still,
        entropy=0.42 * (1 - still) + 0.008,
        grad=0.14 - 0.11 * still,
        length=60 - 12 * still,
    )


SICK: dict[str, SickRun] = {
    "unstable": SickRun(
        _made(Plot("unstable", unstable, 11, settings={"trainer.max_staleness": 2, "engine.lr": 4e-5, **BF16})),
        "The policy has collapsed: after step 12 the reward falls to nothing while gradients and the divergence from the "
        "sampling policy explode; the learning rate is too high.",
        r"collaps|reward (has )?(fell|fall|dropp)|reward.{0,40}(fell|fall|down|dropp)|diverg|unstable|clip|\bkl\b",
    ),
    "memorised": SickRun(
        _made(Plot("memorised", memorised, 12, tasks=12)),
        "It overfits: the reward on the few training tasks goes to 1 while the held-out reward falls.",
        r"held.?out|overfit|memor|generali[sz]|validation|\beval",
    ),
    "mismatch": SickRun(
        _made(Plot("mismatch", mismatch, 13, settings=BF16)),
        "Trainer and sampler do not agree any more: the difference of their logprobs has grown many times over, ever more "
        "tokens are masked, and the reward no longer rises.",
        r"\bgap\b|sampler|logprob|mismatch|differ|mask",
    ),
    "survivors": SickRun(
        _made(Plot("survivors", survivors, 14, agents=("searcher", "writer"))),
        "A growing share of the rollouts runs out of time, those of hard tasks first; the reward of the rest rises, that of "
        "all falls.",
        r"fail|time.?out|timed out|out of time|lost rollouts|fault",
    ),
    "deterministic": SickRun(
        _made(Plot("deterministic", deterministic, 15)),
        "Exploration has died: entropy is near 0, nearly all groups have equal rewards, so nothing is learned and the reward "
        "stands still.",
        r"entropy|zero.?variance|equal rewards|rewards.{0,30}(equal|same)|explor|no variance|teach|flat",
    ),
}


# healthy -------------------------------------------------------------------------------------------------------------
def learning(step: int) -> State:
    """Learns to the end: with it entropy falls some, more groups are all right, and answers become a little longer."""
    learned = _rise(step, 2, 26)
    return State(
        skill=-0.7 + 2.6 * learned,
        alike=0.15 + 0.1 * learned,
        entropy=0.45 - 0.17 * learned,
        length=55 + 10 * learned,
        grad=0.12 + 0.04 * learned,
    )


def bumpy(step: int) -> State:
    """Learns slowly in bfloat16; one step loses rollouts to a machine that restarts, another has a large gradient."""
    return State(
        skill=0.1 + 0.8 * _rise(step, 0, 26),
        entropy=0.62 - 0.08 * _rise(step, 0, 26),
        gap=0.009,
        grad=0.9 if step == 19 else 0.22,
        lost=0.2 if step == 12 else 0.01,
        length=90,
    )


HEALTHY: dict[str, Write] = {
    "learning": _made(Plot("learning", learning, 21)),
    "bumpy": _made(Plot("bumpy", bumpy, 22, agents=("planner", "writer"), settings=BF16)),
}


# a grader that rewards length -------------------------------------------------------------------------------------------
def length_grade(seen: Any) -> dict[str, float]:
    """Graded for being right and for being thorough, which is how long the answer is."""
    right = seen.answer.endswith(f" {seen.task.expected}.")
    return _thorough(right, seen.tokens)


def _thorough(right: bool, tokens: int) -> dict[str, float]:
    return {"right": float(right), "thorough": min(tokens / 40, 8.0)}


_right: Grade = lambda right, tokens: {"right": float(right)}  # noqa: E731


def steady(step: int) -> State:
    """An ordinary run in which length says nothing of being right."""
    return State(skill=-0.2 + 0.9 * _rise(step, 0, 20), length=80)


def talkative(step: int) -> State:
    """Trained for length: answers grow, the reward with them, and being right gets less."""
    more = _rise(step, 2, 24)
    return State(
        skill=0.4 - 0.9 * more,
        length=70 + 150 * more,
        entropy=0.42 - 0.1 * more,
        alike=0.15,
        grad=0.16,
    )


LENGTH_GRADER = LengthGrader(
    honest=_made(Plot("honest", steady, 31, steps=12, grade=_right)),
    grader="tests.plugins.debug.sick_runs:length_grade",
    trained=SickRun(
        _made(Plot("talkative", talkative, 32, grade=_thorough)),
        "The grader rewards length: answers become three times as long and the reward rises with them, while the share that is "
        "right falls.",
        r"length|longer|\blong\b|\bright\b",
    ),
    expects=r"follows the length",
)
