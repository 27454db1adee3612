"""A small training whose tree and advantages are known: two groups of three rollouts, with two calls each.

Group 0: the first two rollouts begin with the same answer and then part, the third begins otherwise. Group 1: equal rewards.
"""

from __future__ import annotations

from pathlib import Path

from lightning.algorithms.lightning_rl import LightningRL
from lightning.store.protocol import Store
from lightning.trainer.context import mark_over
from lightning.trainer.plan import train_rollouts
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.training_data import all_rollouts, load_groups, record_step
from lightning.types import (
    Caller,
    Json,
    Outcome,
    Rollout,
    Run,
    StepReward,
    Task,
    Transition,
    VersionRun,
    logprobs,
    token_ids,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

ALGORITHM = LightningRL("grpo", group_size=3)
FIRST = {0: (10, 11), 1: (10, 11), 2: (12, 13)}
"""The first answer of each rollout of group 0."""
REWARDS = ((1.0, 0.5, 0.0), (0.25, 0.25, 0.25))
MARKUP = "<img src=x onerror=alert(1)>"


def tokenizer(folder: Path) -> Path:
    """A model's folder that has only a tokenizer, of a hundred words."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {f"word{number}": number for number in range(100)}
    Tokenizer(WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    return folder


async def train(
    store: Store, model: str = "", *, own_code: bool = False, run: str = "run", algorithm: LightningRL = ALGORITHM
) -> None:
    """One committed step, of a run that names the `algorithm`."""
    described: Json = {**describe_algorithm(algorithm), **({"name": "my_own"} if own_code else {})}
    await store.put_run(Run(run, run, {"algorithm": described, "train_agents": ["solver"], "model": model}))
    tasks = [Task(f"question {number} {MARKUP}", expected=number) for number in range(2)]
    await store.create_rollouts(train_rollouts(run, 1, tasks, 3, 2))
    for lease in await store.lease(run, "worker", limit=6):
        rollout = lease.rollout
        group = int(rollout.group.rpartition("/")[2])
        await store.append(calls(rollout, group))
        given = (StepReward(0.0, "form", f"{rollout.id}-0", 2.5),)
        await store.complete(
            rollout.id, lease.attempt, Outcome(reward=REWARDS[group][rollout.index], step_rewards=given, seconds=4.0)
        )
    groups = await load_groups(store, await all_rollouts(store, run, split="train", step=1), ["solver"])
    batch = ALGORITHM.batch(groups)
    metrics = {"clip_fraction": 0.02, "masked_share": 0.0}
    await store.commit_step(record_step(run, 1, groups, batch, checkpoint="", metrics=metrics, context={}))
    await mark_over(store, run, True)


def calls(rollout: Rollout, group: int) -> list[Transition]:
    """A call of the solver, which is trained, and one of a critic, which is not."""
    first = FIRST[rollout.index]
    context = [1, 2, 3 + group]
    second = [*context, *first, 9]
    return [
        call(rollout, 0, "solver", context, first),
        call(rollout, 1, "critic", second, (20 + rollout.index, 30)),
    ]


def call(rollout: Rollout, seq: int, agent: str, prompt: list[int], answer: tuple[int, ...]) -> Transition:
    """One call, of two seconds."""
    return Transition(
        rollout.id,
        rollout.attempt,
        seq,
        f"{rollout.id}-{seq}",
        token_ids(prompt),
        token_ids(answer),
        logprobs([-0.5] * len(answer)),
        caller=Caller(agent, (agent,)),
        versions=(VersionRun(0, 0),),
        finish_reason="stop",
        started_at=1000.0 + 2 * seq,
        ended_at=1002.0 + 2 * seq,
    )
