"""Trajectories and groups made by hand, for tests of credit functions, algorithms and engines.

The invariant: what is made is whole: ids, logprobs and versions fit, keys are unique, and every rollout has succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.batch.trajectory import Group, Trajectory
from lightning.types import Caller, Rollout, Status, Task, Transition, VersionRun, logprobs, token_ids

Tokens = Sequence[int]


def make_call(
    prompt: Tokens,
    response: Tokens,
    *,
    rollout: str = "rollout-0",
    seq: int = 0,
    logprob: float | None = -1.0,
    version: int = 0,
    temperature: float = 1.0,
    agent: str = "agent",
) -> Transition:
    """One OK call. `logprob` is that of every response token; None leaves them out, as an engine without logprobs does."""
    return Transition(
        rollout=rollout,
        attempt=1,
        seq=seq,
        id=f"{rollout}/{seq}",
        prompt_ids=token_ids(list(prompt)),
        response_ids=token_ids(list(response)),
        logprobs=logprobs([] if logprob is None else [logprob] * len(response)),
        caller=Caller(agent),
        versions=(VersionRun(0, version),),
        temperature=temperature,
    )


def make_trajectory(
    calls: Sequence[tuple[Tokens, Tokens]] = (((1, 2), (3,)),),
    *,
    rollout: str = "rollout-0",
    group: str = "group-0",
    index: int = 0,
    reward: float = 1.0,
    trainable: Sequence[bool] | None = None,
) -> Trajectory:
    """A succeeded rollout whose calls have these (prompt ids, response ids); all are trainable unless told."""
    flags = tuple(trainable) if trainable is not None else (True,) * len(calls)
    record = Rollout(
        id=rollout,
        run="run",
        task=Task("task"),
        group=group,
        index=index,
        status=Status.SUCCEEDED,
        attempt=1,
        reward=reward,
    )
    transitions = tuple(
        make_call(prompt, response, rollout=rollout, seq=seq) for seq, (prompt, response) in enumerate(calls)
    )
    return Trajectory(record, transitions, flags)


def make_group(
    rewards: Sequence[float], *, group: str = "group-0", calls: Sequence[tuple[Tokens, Tokens]] = (((1, 2), (3,)),)
) -> Group:
    """A group with one rollout for each reward, all with the same calls."""
    return Group(
        group,
        tuple(
            make_trajectory(calls, rollout=f"{group}/{index}", group=group, index=index, reward=reward)
            for index, reward in enumerate(rewards)
        ),
    )
