"""The training step beside the naive way: rows that merge the calls of a rollout, against one row for each call.

Both run on the same engine and the same tiny Qwen3, with the same weights of tokens, so that loss and gradient are equal
(printed) and only the work differs. Turns extend one another, as in any chat agent; with one turn there is nothing to merge.
Then row assembly: recorded tokens per CPU-second from transitions to arrays, against parallel Python lists padded to a
rectangle, one row for each call. Then a step with a vocabulary of SmolLM2's size, whose loss also pushes the entropy, or the
entropy among the 16 most probable tokens, beside one that pushes neither.

    python tests/bench/bench_engine.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lightning.batch import Sample, Trajectory, build_samples
from lightning.engines.protocol import OptimizerConfig, StepResult
from lightning.engines.rows import by_call
from lightning.engines.torch.engine import TorchEngine
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import Loss, LossOutput, TokenBatch
from lightning.testing.tiny_models import make_tiny_model
from lightning.testing.trajectories import make_trajectory
from torch.profiler import ProfilerActivity, profile

VOCABULARY, HIDDEN, LAYERS = 2048, 128, 4
REPEATS = 3
PLAIN = ClippedPolicyGradient(correction=NO_CORRECTION)


@dataclass(frozen=True, slots=True)
class Shape:
    """`rollouts` agents of `turns` calls: tokens of the first prompt, of each response, and of what comes between two."""

    rollouts: int
    turns: int
    prompt: int
    response: int
    observation: int


STEPS = (Shape(8, 1, 200, 32, 32), Shape(8, 4, 200, 32, 32), Shape(8, 8, 200, 32, 32))
ASSEMBLY = Shape(64, 8, 1000, 256, 50)
WORDS, WIDE, TOP = 49_152, 576, 16
LONG = Shape(8, 1, 64, 64, 0)
"""Of answers that are half of all tokens, so that the output layer has much to do."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the cheapest of some repeats took."""

    cpu: float
    wall: float


def conversations(shape: Shape, seed: int = 0) -> list[Trajectory]:
    """Agents whose every prompt continues the call before."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    made = []
    for index in range(shape.rollouts):
        prompt, calls = ids(shape.prompt), []
        for _ in range(shape.turns):
            response = ids(shape.response)
            calls.append((tuple(prompt), tuple(response)))
            prompt = [*prompt, *response, *ids(shape.observation)]
        made.append(make_trajectory(calls, rollout=f"rollout-{index}", index=index))
    return made


def advantages(trajectories: Sequence[Trajectory]) -> list[list[float]]:
    """Alternately praise and blame."""
    return [[(-1.0) ** index] * len(item.transitions) for index, item in enumerate(trajectories)]


def one_row_per_call(rows: Sequence[Sample]) -> list[Sample]:
    """The same calls with the same weights, each in a row of its own."""
    return [part for row in rows for part in by_call(row)]


def padded_lists(trajectories: Sequence[Trajectory], values: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """Parallel lists of Python numbers, one entry for each call, padded to the longest: how trainers usually convert."""
    ids, mask, logprobs, credit = [], [], [], []
    for trajectory, mine in zip(trajectories, values, strict=True):
        for call, advantage in zip(trajectory.transitions, mine, strict=True):
            before, after = len(call.prompt_ids), len(call.response_ids)
            ids.append(call.prompt_ids.tolist() + call.response_ids.tolist())
            mask.append([0.0] * before + [1.0] * after)
            logprobs.append([0.0] * before + call.logprobs.tolist())
            credit.append([0.0] * before + [advantage] * after)
    longest = max(map(len, ids))
    kinds = ((ids, np.int64), (mask, np.float32), (logprobs, np.float32), (credit, np.float32))
    return [np.array([row + [0] * (longest - len(row)) for row in rows], kind) for rows, kind in kinds]


def fastest(*ways: Callable[[], object]) -> list[Cost]:
    """Each way's cheapest repeat; the ways take turns, so that a busy machine slows all of them."""
    costs: list[list[Cost]] = [[] for _ in ways]
    for _ in range(REPEATS):
        for way, mine in zip(ways, costs, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            way()
            mine.append(Cost(time.process_time() - cpu, time.perf_counter() - wall))
    return [Cost(min(cost.cpu for cost in mine), min(cost.wall for cost in mine)) for mine in costs]


def steps(model: Path, shape: Shape) -> dict[str, float]:
    """One optimizer step on merged rows and on a row for each call."""
    trajectories = conversations(shape)
    merged = build_samples(trajectories, advantages(trajectories))
    single = one_row_per_call(merged)
    engines = [TorchEngine(device="cpu", step="linear") for _ in range(2)]  # the tree would merge what was cut
    for engine in engines:
        engine.open(model, OptimizerConfig(lr=1e-6), seed=0)
    first: list[StepResult] = [
        engine.step(rows, PLAIN) for engine, rows in zip(engines, (merged, single), strict=True)
    ]  # also the warm-up
    ours, naive = fastest(lambda: engines[0].step(merged, PLAIN), lambda: engines[1].step(single, PLAIN))
    for engine in engines:
        engine.close()
    mine, theirs = (result.metrics for result in first)
    return {
        "ours_tokens_computed": mine["tokens_forward"],
        "naive_tokens_computed": theirs["tokens_forward"],
        "tokens_ratio": theirs["tokens_forward"] / mine["tokens_forward"],
        "ours_cpu_seconds": ours.cpu,
        "naive_cpu_seconds": naive.cpu,
        "cpu_ratio": naive.cpu / ours.cpu,
        "ours_wall_seconds": ours.wall,
        "naive_wall_seconds": naive.wall,
        "wall_ratio": naive.wall / ours.wall,
        "ours_trained_tokens_per_second": mine["tokens"] / ours.wall,
        "naive_trained_tokens_per_second": theirs["tokens"] / naive.wall,
        "gradient_norm_difference": abs(mine["grad_norm"] - theirs["grad_norm"]) / theirs["grad_norm"],
    }


def assembly(shape: Shape) -> dict[str, float]:
    """From transitions to arrays; recorded tokens are all prompts and responses, repeated prefixes too."""
    trajectories = conversations(shape)
    values = advantages(trajectories)
    calls = [call for trajectory in trajectories for call in trajectory.transitions]
    recorded = sum(len(call.prompt_ids) + len(call.response_ids) for call in calls)
    ours, naive = fastest(lambda: build_samples(trajectories, values), lambda: padded_lists(trajectories, values))
    rows = build_samples(trajectories, values)
    bytes_of_ours = sum(
        array.nbytes for row in rows for array in (row.ids, row.weights, row.advantages, row.logprobs, row.versions)
    )
    bytes_of_naive = sum(array.nbytes for array in padded_lists(trajectories, values))
    return {
        "recorded_tokens": recorded,
        "ours_rows": len(rows),
        "naive_rows": len(calls),
        "ours_cpu_seconds": ours.cpu,
        "naive_cpu_seconds": naive.cpu,
        "ours_tokens_per_cpu_second": recorded / ours.cpu,
        "naive_tokens_per_cpu_second": recorded / naive.cpu,
        "cpu_ratio": naive.cpu / ours.cpu,
        "ours_bytes": bytes_of_ours,
        "naive_bytes": bytes_of_naive,
        "bytes_ratio": bytes_of_naive / bytes_of_ours,
    }


@dataclass(frozen=True, slots=True)
class AmongTop:
    """The policy gradient, and the entropy among the most probable tokens."""

    needs_top_logprobs: int = TOP

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the loss."""
        assert batch.top_logprobs is not None
        among = torch.log_softmax(batch.top_logprobs, -1)
        pushed = batch.weights * (among.exp() * among).sum(-1)
        found = PLAIN(batch)
        return LossOutput(found.loss + 0.01 * pushed.sum(), found.metrics)


def peak_bytes(way: Callable[[], object]) -> float:
    """The most bytes that live at one time of those that torch's allocator gives out meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        way()
    assert measured.profiler is not None
    changes = [event.nbytes() for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    return float(np.cumsum(changes).max())


def losses(model: Path) -> dict[str, float]:
    """A gradient with each loss."""
    trajectories = conversations(LONG)
    rows = build_samples(trajectories, advantages(trajectories))
    engine = TorchEngine(device="cpu", dtype="float32")
    engine.open(model, OptimizerConfig(), seed=0)
    entropy = ClippedPolicyGradient(entropy_coefficient=0.01, correction=NO_CORRECTION)
    given: dict[str, Loss] = {"plain": PLAIN, "entropy": entropy, f"top_{TOP}": AmongTop()}

    def taking(loss: Loss) -> Callable[[], object]:
        def take() -> None:
            engine.forward_backward(rows, loss)

        return take

    ways, peaks = [taking(loss) for loss in given.values()], []
    for way in ways:
        way()
        engine.discard_gradient()
        peaks.append(peak_bytes(way))
    costs = fastest(*ways)  # gradients are added to those that are there
    engine.close()
    found: dict[str, float] = {}
    for name, cost, peak in zip(given, costs, peaks, strict=True):
        found |= {f"{name}_cpu_seconds": cost.cpu, f"{name}_peak_mib": peak / 2**20}
        found |= {f"{name}_cpu_ratio": cost.cpu / costs[0].cpu, f"{name}_peak_ratio": peak / peaks[0]}
    return found


def main(out: Path | None = None) -> dict[str, float]:
    """Measure, print a table, write JSON to `out`."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", hidden=HIDDEN, layers=LAYERS, vocab=VOCABULARY)
        for shape in STEPS:
            found |= {f"step_{shape.turns}_turns_{name}": value for name, value in steps(model, shape).items()}
        wide = make_tiny_model(Path(folder) / "wide", hidden=WIDE, layers=LAYERS, vocab=WORDS)
        found |= {f"loss_{name}": value for name, value in losses(wide).items()}
    found |= {f"assembly_{name}": value for name, value in assembly(ASSEMBLY).items()}
    sys.stdout.write("".join(f"{name:<52}{value:>16,.6g}\n" for name, value in found.items()))
    if out is not None:
        out.write_text(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    main(parser.parse_args().json)
