"""Makes runs whose health is known: a made-up policy answers sums, and everything is recorded as the trainer's loop does.

The invariant: only the policy and the engine are made up. Rollouts are leased, recorded and completed, groups become batches,
and steps and evaluations are measured and committed by the functions that the loop calls, so a run has all the rows and all
the metrics that a real one has. The engine's metrics follow from the differences between trainer and sampler that are drawn
for each token, so they fit one another. Everything is drawn from `Plot.seed`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
from lightning import LightningRL
from lightning.algorithms.protocol import Batch
from lightning.config import Config, with_settings
from lightning.engines.protocol import StepResult
from lightning.engines.step import StepDriver
from lightning.store.protocol import Store
from lightning.testing.vllm_replies import tokenize
from lightning.trainer.context import mark_over, numeric_context
from lightning.trainer.metrics import staleness, step_metrics
from lightning.trainer.plan import tasks_of_step, train_rollouts, val_rollouts
from lightning.trainer.runs import describe_algorithm
from lightning.trainer.summary import evaluate_rollouts
from lightning.trainer.training_data import load_groups, record_step
from lightning.types import (
    Caller,
    Fault,
    Json,
    Outcome,
    Rollout,
    Run,
    Task,
    Transition,
    VersionRun,
    logprobs,
    token_ids,
)
from lightning_debug.garbled import look_at
from lightning_record import exchanges

MAX_TOKENS = 320
"""Where an answer is cut off."""
TIME = 1_790_000_000.0
"""Unix time at which every run begins."""
WORDS = (
    "so",
    "we",
    "take",
    "the",
    "first",
    "number",
    "then",
    "carry",
    "one",
    "over",
    "add",
    "both",
    "sides",
    "check",
    "again",
    "and",
    "it",
    "is",
    "as",
    "before",
)


@dataclass(frozen=True)
class State:
    """The policy at one step. `skill` is the logit of an answer to a task of mean difficulty being right, `val_skill` what is
    added to it on held-out tasks; `alike` is the share of rollouts that do what the first of their group did; `length` is the
    mean of an answer's tokens; `entropy` that of -logprob, in nats; `gap` the mean of |trainer - sampler|, in nats; `grad` the
    gradient's norm; `timeouts` the share of rollouts that run out of time, on tasks of mean difficulty."""

    skill: float = 0.0
    val_skill: float = 0.0
    alike: float = 0.2
    length: float = 60.0
    entropy: float = 0.4
    gap: float = 1e-6
    grad: float = 0.12
    timeouts: float = 0.0
    lost: float = 0.01


Grade = Callable[[bool, int], "float | dict[str, float]"]
"""What the agent returns for an answer: whether it is right, and how many tokens it has."""


@dataclass(frozen=True)
class Plot:
    """A run to be made. `state` gives the policy after so many steps, `agents` call the model one after the other."""

    run: str
    state: Callable[[int], State]
    seed: int
    steps: int = 26
    tasks: int = 96
    held_out: int = 40
    tasks_per_step: int = 6
    group_size: int = 8
    eval_every: int = 5
    agents: tuple[str, ...] = ("solver",)
    grade: Grade = lambda right, tokens: float(right)
    settings: dict[str, Any] = field(default_factory=dict)


class Maker:
    """Writes one run."""

    def __init__(self, store: Store, plot: Plot) -> None:
        self.store, self.plot, self.rng = store, plot, np.random.default_rng(plot.seed)
        self.algorithm = LightningRL("grpo", group_size=plot.group_size)
        self.train = [self._sum(10, 99) for _ in range(plot.tasks)]
        self.val = [self._sum(100, 199) for _ in range(plot.held_out)]
        self.difficulty = {task.id: float(self.rng.normal(0, 1.6)) for task in (*self.train, *self.val)}
        self.config = with_settings(
            Config(),
            {
                "trainer.steps": plot.steps,
                "trainer.tasks_per_step": plot.tasks_per_step,
                "trainer.eval_every": plot.eval_every,
                "engine.lr": 1e-6,
                **plot.settings,
            },
        )
        self.begun: dict[int, int] = {}
        self.clock = TIME

    def _sum(self, low: int, high: int) -> Task:
        one, other = (int(value) for value in self.rng.integers(low, high, 2))
        return Task(f"What is {one} + {other}?", str(one + other), {"n": int(self.rng.integers(1 << 30))})

    async def write(self) -> str:
        """All of the run; returns its id."""
        plot = self.plot
        described: dict[str, Json] = {
            "model": "/models/qwen3-0.6b",
            "algorithm": describe_algorithm(self.algorithm),
            "train_agents": [],
            "engine": "torch",
            "head": "",
            "seed": self.config.trainer.seed,
            "config": self.config.model_dump(mode="json"),
            "tasks": {"train": [task.id for task in self.train], "val": [task.id for task in self.val]},
        }
        await self.store.put_run(Run(plot.run, plot.run, described, TIME))
        await self.store.log_metrics(plot.run, 0, {"seconds/start": 41.3})
        for step in range(plot.steps):
            if step % plot.eval_every == 0:
                await self.evaluate(step)
            await self.step(step + 1)
        await self.evaluate(plot.steps)
        await mark_over(self.store, plot.run, True)
        return plot.run

    async def evaluate(self, step: int) -> None:
        """The held-out tasks, as `Loop.evaluate` has them run and logs them."""
        state = self.plot.state(step)
        planned = val_rollouts(self.plot.run, step, self.val, 2)
        ended = await self.executed(planned, replace(state, skill=state.skill + state.val_skill), step)
        result = evaluate_rollouts(step, ended)
        values = {"eval/failed": float(result.failed)}
        values |= {f"eval/rewards/{name}": value for name, value in result.rewards.items()}
        if result.reward is not None:
            values["eval/reward"] = result.reward
        values["eval/reward_with_failures"] = result.reward_with_failures
        values["seconds/eval"] = 9.0 * float(self.rng.lognormal(0, 0.1))
        await self.store.log_metrics(self.plot.run, step, values)

    async def step(self, step: int) -> None:
        """One step, as `Loop.step` does it."""
        plot, state = self.plot, self.plot.state(step - 1)
        tasks = tasks_of_step(self.train, step - 1, plot.tasks_per_step, self.config.trainer.seed)
        bound = min(step - 1, self.config.trainer.max_staleness)
        rollouts: list[Rollout] = []
        for task in tasks:
            begun = step - int(self.rng.integers(0, bound + 1))
            first = self.begun.get(begun, 0)
            self.begun[begun] = first + 1
            planned = train_rollouts(plot.run, begun, [task], plot.group_size, 2, first=first)
            rollouts += await self.executed(planned, plot.state(begun - 1), begun - 1)
        groups = await load_groups(self.store, rollouts, (), self.config.trainer.policy_fault)
        batch = self.algorithm.batch(groups)
        result = StepResult(self.engine_metrics(batch, state), {})
        metrics = step_metrics(rollouts, groups, batch, result) | staleness(step - 1, batch)
        metrics |= look_at(groups).recorded
        seconds = {
            "rollout": (4.0 + 0.03 * state.length + 40 * state.timeouts) * float(self.rng.lognormal(0, 0.12)),
            "checkpoint": 0.02,
            "train": 2.0 + 0.0004 * result.metrics["tokens"] * float(self.rng.lognormal(0, 0.1)),
            "update": 0.6 * float(self.rng.lognormal(0, 0.1)),
        }
        sampled = sum(
            len(call.response_ids) for group in groups for one in group.trajectories for call in one.transitions
        )
        metrics |= {
            "prefix_hit_share": 0.7 + 0.02 * float(self.rng.normal()),
            "preemptions": 0.0,
            "drift_tokens": 0.0,
            "tokens_per_second": sampled / seconds["rollout"],
        }
        if bound:
            begun, open_ = float(plot.tasks_per_step), float(plot.tasks_per_step + bound)
            metrics |= {"pipeline/groups_begun": begun, "pipeline/groups_open": open_, "pipeline/groups_carried": 2.0}
            metrics |= {"pipeline/groups_dropped": 0.0, "pipeline/rollouts_unfinished": open_ * plot.group_size / 2}
        named: dict[str, Json] = {"epoch": 0, "weights": f"{step:064x}", "base": f"{0:064x}"}
        context = named | numeric_context(None, self.config.engine.model_dump(mode="json"), result.metrics)
        record = record_step(plot.run, step, groups, batch, checkpoint="", metrics=metrics, context=context)
        await self.store.commit_step(record)
        if "mean_logprob_gap" in result.metrics:
            probe = min(result.metrics["mean_logprob_gap"], 0.02) * float(self.rng.uniform(0.7, 1.2))
            metrics |= {"probe_gap": 3 * probe, "probe_gap_mean": probe}
        metrics["held_seconds"] = seconds["update"] * 0.8
        metrics |= {f"seconds/{phase}": value for phase, value in seconds.items()}
        await self.store.log_metrics(plot.run, step, metrics)
        self.clock += sum(seconds.values())

    async def executed(self, planned: Sequence[Rollout], state: State, version: int) -> list[Rollout]:
        """The rollouts, run to their end by one worker."""
        await self.store.create_rollouts(planned)
        leased = await self.store.lease(self.plot.run, "worker-0", limit=len(planned))
        luck: dict[str, float] = {}
        calls: list[Transition] = []
        outcomes: list[tuple[Rollout, Outcome]] = []
        for lease in leased:
            rollout = lease.rollout
            shared = luck.setdefault(rollout.group, float(self.rng.random()))
            own = shared if self.rng.random() < state.alike else float(self.rng.random())
            made, outcome = self.attempt(rollout, state, version, own)
            calls += made
            outcomes.append((rollout, outcome))
        await self.store.append(calls)
        ended = (self.store.complete(rollout.id, rollout.attempt, outcome) for rollout, outcome in outcomes)
        return await asyncio.gather(*ended)

    def attempt(self, rollout: Rollout, state: State, version: int, luck: float) -> tuple[list[Transition], Outcome]:
        """The calls of one attempt, and how it ends."""
        hard = self.difficulty[rollout.task.id]
        right = luck < 1 / (1 + np.exp(hard - state.skill))
        calls: list[Transition] = []
        seconds, tokens, cut = 0.3, 0, False
        for seq, agent in enumerate(self.plot.agents):
            wanted = state.length / len(self.plot.agents) * self.rng.lognormal(0.08 * hard, 0.3)
            count = int(np.clip(wanted, 8, MAX_TOKENS))
            cut = wanted >= MAX_TOKENS
            right = right and not cut
            text = self.answer(rollout.task, right, count, cut)
            calls.append(self.call(rollout, seq, agent, text, state, version, cut=cut))
            tokens += len(calls[-1].response_ids)
            seconds += calls[-1].ended_at - calls[-1].started_at
        if self.rng.random() < np.clip(state.timeouts * (1 + 0.9 * np.tanh(hard)), 0, 0.97):
            limit = self.config.runner.timeout
            error = f"the agent ran for more than {limit:g} s and was killed (runner.timeout)"
            return calls, Outcome(fault=Fault.TIMEOUT, error=error, seconds=limit)
        if self.rng.random() < state.lost:
            error = "Traceback (most recent call last):\nConnectionResetError: [Errno 104] Connection reset by peer"
            return calls, Outcome(fault=Fault.AGENT, error=error, seconds=seconds)
        found = self.plot.grade(bool(right), tokens)
        parts = found if isinstance(found, dict) else {}
        reward = sum(found.values()) if isinstance(found, dict) else found
        return calls, Outcome(reward=reward, rewards=parts, seconds=seconds)

    def answer(self, task: Task, right: bool, count: int, cut: bool) -> str:
        """A text of about so many words that ends with a number, unless it is cut off."""
        number = int(str(task.expected)) + (0 if right else int(self.rng.integers(1, 9)))
        start = int(self.rng.integers(len(WORDS)))
        words = [WORDS[(start + place) % len(WORDS)] for place in range(count)]
        return " ".join(words if cut else [*words[: max(1, count - 5)], "The", "answer", "is", f"{number}."])

    def call(
        self, rollout: Rollout, seq: int, agent: str, text: str, state: State, version: int, *, cut: bool
    ) -> Transition:
        """One model call with its exchange."""
        prompt = f"You are the {agent}. Answer with a number. {rollout.task.input}"
        reason = "length" if cut else "stop"
        ids = [*tokenize(text), *([] if cut else [2])]
        # Most tokens are certain, a few are not: what a language model's logprobs look like.
        values = -self.rng.gamma(0.35, state.entropy / 0.35, len(ids))
        began = self.clock + float(self.rng.uniform(0, 2))
        request = {"model": "policy", "messages": [{"role": "user", "content": prompt}], "temperature": 1.0}
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 20, "completion_tokens": len(ids), "total_tokens": 20 + len(ids)}
        reply: dict[str, Any] = {"id": f"chatcmpl-{rollout.id}-{seq}", "object": "chat.completion", "usage": usage}
        reply["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
        sent, got = exchanges.canonical(request), json.dumps(reply).encode()
        return Transition(
            rollout=rollout.id,
            attempt=rollout.attempt,
            seq=seq,
            id=f"chatcmpl-{rollout.id}-{seq}",
            prompt_ids=token_ids(tokenize(prompt)),
            response_ids=token_ids(ids),
            logprobs=logprobs(values.tolist()),
            caller=Caller(agent, (agent,)),
            versions=(VersionRun(0, version),),
            finish_reason=reason,
            started_at=began,
            ended_at=began + 0.2 + 0.02 * len(ids),
            requested_model="policy",
            extras={exchanges.TEXTS: exchanges.pack("/chat/completions", 200, sent, got)},
        )

    def engine_metrics(self, batch: Batch, state: State) -> dict[str, float]:
        """What an engine reports, from a difference between trainer and sampler drawn for each trained token."""
        rng = self.rng
        trained = sum(span.stop - span.start for sample in batch.samples for span in sample.spans)
        if not trained:  # nothing to learn from: the engine computes nothing and leaves the weights alone
            return dict(StepDriver(max_nonfinite_steps=1).step(Mock(), (), self.algorithm.loss).metrics)
        lows = [-float(value) for sample in batch.samples for value in sample.logprobs[sample.weights != 0]]
        apart = rng.laplace(0, state.gap, trained) * rng.lognormal(-0.125, 0.5, trained)
        ratio, size = np.exp(apart), np.abs(apart)
        up = rng.random(trained) < 0.5
        kept = ratio[(ratio >= 0.5) & (ratio <= 5.0)]
        return {
            "entropy": float(np.mean(lows)) * float(rng.lognormal(0, 0.03)),
            "clip_fraction": float(np.mean(np.where(up, ratio > 1.28, ratio < 0.8))),
            "dual_clip_fraction": float(np.mean(~up & (ratio > 3.0))),
            "masked_share": float(1 - len(kept) / trained),
            "correction_weight": float(len(kept) / trained),
            "approx_kl": float(np.mean(ratio - 1 - apart)),
            "ratio": float(np.mean(ratio)),
            "old_logprob_share": 1.0,
            "ess": float(ratio.sum() ** 2 / (trained * (ratio**2).sum())),
            "ratio_max": float(ratio.max()),
            "loss": float(rng.normal(0, 0.06)),
            "tokens": float(trained),
            "tokens_forward": float(sum(map(len, batch.samples))),
            "tokens_compared": float(trained),
            "microbatches": float(1 + sum(map(len, batch.samples)) // self.config.engine.tokens_per_microbatch),
            "tree": 1.0,
            "max_logprob_gap": float(size.max()),
            "mean_logprob_gap": float(size.mean()),
            "p999_logprob_gap": float(np.quantile(size, 0.999)),
            "grad_norm": state.grad * float(rng.lognormal(0, 0.22)),
            "lr": float(self.config.engine.lr or 1e-6),
            "stepped": 1.0,
            "skipped_nonfinite": 0.0,
        }
