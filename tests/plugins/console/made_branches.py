"""A group with branches of both kinds, whose tree is known: those that training made, and those of a run of their own.

Two trunks say the same first. The first one's second call has two branches of training's, one of which is void. Its third
call has two of `lightning branch`, with an edited answer, after which one ends and the other one says something.
"""

from __future__ import annotations

from lightning.store.protocol import Store
from lightning.trainer.context import mark_over
from lightning.types import (
    BRANCH_VOID,
    CallStatus,
    Fault,
    Json,
    Outcome,
    Rollout,
    Run,
    Task,
    Transition,
    logprobs,
    token_ids,
)

from tests.plugins.console.made_rollouts import MARKUP, call

VOID = "This branch is void: call 1 has another clock"
TRUNK = "run/1/0/0"
EDIT = f"look again {MARKUP}"
PROMPTS = ([1, 2, 3], [1, 2, 3, 10, 9], [1, 2, 3, 10, 9, 20, 9])


async def write(store: Store, *, ended: bool = True) -> None:
    """All of it; without `ended` one of the branches of the run of their own goes on."""
    await store.put_run(Run("run", "run", {}, 1.0))
    task = Task("a question")
    own = [Rollout(f"run/1/0/{n}", "run", task, "run/1/0", 1, index=n) for n in range(2)]
    branches = [
        Rollout(f"run/1/0/{n}", "run", task, "run/1/0", 1, index=n, max_attempts=1, parent=(TRUNK, 1, 1))
        for n in (2, 3)
    ]
    await store.create_rollouts([*own, *branches])
    await store.lease("run", "worker", limit=4)
    await end(store, "run/1/0/0", 1.0, [(0, 10), (1, 20), (2, 30)])
    await end(store, "run/1/0/1", 0.0, [(0, 10), (1, 21)])
    await end(store, "run/1/0/2", 0.5, [(1, 22), (2, 31)])
    await end(store, "run/1/0/3", None, [])
    await mark_over(store, "run", True)
    await again(store, ended=ended)


async def again(store: Store, *, ended: bool) -> None:
    """The run of branches; and one of branches of another rollout."""
    for name, parent in (("again", TRUNK), ("other", "elsewhere/0/0/0")):
        changes: dict[str, Json] = {"branch": {"rollout": parent, "at": 3, "edit": EDIT}}
        await store.put_run(Run(name, name, changes, 2.0))
        await store.create_rollouts(
            [
                Rollout(f"{name}/{n}", name, Task("a question"), name, split="branch", index=n, parent=(parent, 1, 2))
                for n in range(2)
            ]
        )
        await store.lease(name, "worker", limit=2)
    await end(store, "again/0", 0.25, [])
    if ended:
        await end(store, "again/1", 0.75, [(2, 40)])


async def end(store: Store, name: str, reward: float | None, answers: list[tuple[int, int]]) -> None:
    """Complete a rollout with a call for each `(place in the line, answered token)`; without a reward as a void branch."""
    rollout = await store.get_rollout(name)
    assert rollout is not None
    made = [call(rollout, seq, "solver", PROMPTS[place], (token,)) for seq, (place, token) in enumerate(answers)]
    if reward is None:
        made = [refused(rollout)]
    await store.append(made)
    outcome = Outcome(reward=reward) if reward is not None else Outcome(fault=Fault.AGENT, error=VOID)
    await store.complete(name, rollout.attempt, outcome)


def refused(rollout: Rollout) -> Transition:
    """What the gateway records of a branch that is void."""
    return Transition(
        rollout.id,
        rollout.attempt,
        0,
        f"{rollout.id}-0",
        token_ids([]),
        token_ids([]),
        logprobs([]),
        status=CallStatus.REFUSED,
        finish_reason=BRANCH_VOID,
        error=VOID,
    )
