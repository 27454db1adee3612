"""A training step of a real model, SmolLM2-135M-Instruct, beside what the machine's matrix products can do.

The rows are shaped as those of `make demo`: groups of 8 rollouts with 2 or 3 calls of about 13 tokens, behind a prompt of 200
tokens of which 170 are the same in all tasks; four groups, since the others of a step of eight teach nothing. Their tokens are
random, which costs the same. Each line is a process of its own, so that its peak memory is its own.

`ratio` is the FLOPs of the unique tokens, 6 * (P * computed + V * H * trained), over the seconds of a step times the FLOPs a
second of the best product of two matrices of 2,048 x 2,048, measured in the same dtype, on as many threads, between the steps;
`mean_ratio` is over their mean, which is nearer to what a machine that others share gives for ten seconds.
P are the parameters of the layers, V * H those of the output layer; 6 stands for 2 forward and 4 backward. Attention, norms,
gradient accumulation, clipping and AdamW are not counted in the FLOPs and are in the seconds. `with_attention` counts attention
too, 12 * L * A * context for each unique token (A: heads times their size), as model FLOPs utilization does (PaLM, arXiv
2204.02311, appendix B).

    python tests/bench/bench_real.py [--json FILE] [--only step|compared|around] [--dtype DTYPE] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from lightning.batch import Sample, build_samples
from lightning.batch.radix import build_tree
from lightning.config.sections import StepKind
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.testing.trajectories import make_trajectory
from lightning_examples.smollm2 import model_folder
from transformers import PretrainedConfig

GROUPS, ROLLOUTS, SHARED, OWN, RESPONSE, OBSERVATION = 4, 8, 170, 30, 13, 12
STEPS = 2
"""Measured ones, behind one that makes the optimizer's moments."""
MATRIX, PRODUCTS = 2048, 12
CONFIGURATIONS = [(dtype, threads) for dtype in ("float32", "bfloat16") for threads in (1, 2)]
KINDS = ("tree", "linear", "per-call")


def rows(groups: int, vocabulary: int) -> tuple[Sample, ...]:
    """The rows of some groups, alternately praised and blamed. No sampler's logprobs: of random tokens all would be masked."""
    generator = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        found: list[int] = generator.integers(0, vocabulary, count).tolist()
        return found

    shared, made = ids(SHARED), []
    for group in range(groups):
        prompt = [*shared, *ids(OWN)]
        for index in range(ROLLOUTS):
            context, calls = list(prompt), []
            for _ in range(int(generator.integers(2, 4))):
                response = ids(int(generator.integers(RESPONSE - 3, RESPONSE + 4)))
                calls.append((tuple(context), tuple(response)))
                context += [*response, *ids(OBSERVATION)]
            made.append(make_trajectory(calls, rollout=f"rollout-{group}-{index}", index=index))
    earned = [[(-1.0) ** index] * len(one.transitions) for index, one in enumerate(made)]
    return tuple(replace(row, logprobs=np.full_like(row.logprobs, np.nan)) for row in build_samples(made, earned))


def products(dtype: str) -> list[float]:
    """FLOPs per second of some products."""
    kind = getattr(torch, dtype)
    one, other = (torch.randn(MATRIX, MATRIX).to(kind) for _ in range(2))
    seconds = []
    for _ in range(PRODUCTS):
        began = time.perf_counter()
        one @ other
        seconds.append(time.perf_counter() - began)
    return [2.0 * MATRIX**3 / one for one in seconds]


def attention_flops(samples: Sequence[Sample], config: PretrainedConfig) -> float:
    """Of attention, forward and backward, each unique token once."""
    tree = build_tree([sample.ids for sample in samples])
    context = sum(sum(range(node.depth + 1, node.depth + len(node) + 1)) for node in tree.nodes)
    return 12.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context


def opened(dtype: str, threads: int, kind: StepKind) -> TorchEngine:
    engine = TorchEngine(device="cpu", dtype=dtype, threads=threads, step=kind)
    engine.open(model_folder(), OptimizerConfig(lr=1e-6), seed=0)
    return engine


def mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def steps(dtype: str, threads: int, kind: StepKind, groups: int, count: int) -> dict[str, float]:
    """Some steps; of the fastest its seconds, and the median ratio."""
    engine = opened(dtype, threads, kind)
    lm = engine._opened()
    samples, loss = rows(groups, lm.vocab_size), ClippedPolicyGradient()
    trunk = lm.model.base_model.layers
    layers = sum(parameter.numel() for parameter in trunk.parameters())
    head = lm.model.get_output_embeddings().weight.numel()
    attention = attention_flops(samples, lm.model.config)
    found: list[dict[str, float]] = []
    for number in range(count + 1):
        rates = products(dtype)
        wall, cpu = time.perf_counter(), time.process_time()
        metrics = engine.step(samples, loss).metrics
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if metrics["tree"] != (kind == "tree"):
            raise SystemExit(f"asked for {kind}, but the metric tree is {metrics['tree']}")
        rates += products(dtype)
        best, mean = max(rates), float(np.mean(rates))
        flops = 6.0 * (layers * metrics["tokens_forward"] + head * metrics["tokens"])
        if number or not count:
            ratios = {"ratio": flops / wall / best, "mean_ratio": flops / wall / mean}
            ratios["with_attention"] = (flops + attention) / wall / best
            found.append({"seconds": wall, "cpu_seconds": cpu, "peak_gflops": best / 1e9, **ratios})
    return {
        **min(found, key=lambda own: own["seconds"]),
        **{name: float(np.median([own[name] for own in found])) for name in ratios},
        "tokens_computed": metrics["tokens_forward"],
        "tokens_trained": metrics["tokens"],
        "peak_mib": mebibytes(),
    }


def around(dtype: str, threads: int) -> dict[str, float]:
    """Seconds of what comes with a step: the weights for vLLM, a checkpoint, and a step that teaches nothing."""
    engine = opened(dtype, threads, "auto")
    samples, loss = rows(1, engine._opened().vocab_size), ClippedPolicyGradient()
    engine.step(samples, loss)
    idle = [replace(sample, weights=np.zeros_like(sample.weights)) for sample in samples]
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = {
            "update": lambda: engine.weights(folder / "weights.safetensors"),
            "checkpoint": lambda: engine.save(folder / "state"),
            "idle_step": lambda: engine.step(idle, loss),
        }
        for what, way in ways.items():
            began = time.perf_counter()
            way()
            found[f"{what}_seconds"] = time.perf_counter() - began
    return found


def apart(*arguments: object) -> dict[str, float]:
    """What this file says of some arguments in a process of its own."""
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def show(name: str, numbers: dict[str, float]) -> dict[str, float]:
    sys.stdout.write(f"{name:<32}" + "  ".join(f"{key} {value:,.4g}" for key, value in numbers.items()) + "\n")
    sys.stdout.flush()
    return {f"{name}_{key}": value for key, value in numbers.items()}


def main(out: Path | None, only: str | None, dtype: str | None, threads: int | None) -> None:
    """Measure, print a line for each, write JSON to `out`."""
    model_folder()  # once, before anything is measured
    found: dict[str, float] = {}
    chosen = [pair for pair in CONFIGURATIONS if dtype in (None, pair[0]) and threads in (None, pair[1])]
    for kind, many in chosen:
        name = f"{kind}_{many}_threads"
        if only in (None, "step"):
            found |= show(f"step_{name}", apart("steps", kind, many, "tree", GROUPS, STEPS))
        if only in (None, "compared"):  # one group: the rows of four take minutes
            found |= {
                key: value
                for way in KINDS
                for key, value in show(f"one_group_{name}_{way}", apart("steps", kind, many, way, 1, 1)).items()
            }
        if only in (None, "around") and many == 1:
            found |= show(f"around_{name}", apart("around", kind, many))
    if out is not None:
        out.write_text(json.dumps(found, indent=2))


def measure(what: str, dtype: str, threads: str, *rest: str) -> dict[str, float]:
    """What `apart` asks."""
    if what == "around":
        return around(dtype, int(threads))
    kind, groups, count = rest
    if kind not in get_args(StepKind):
        raise SystemExit(f"{kind} is no kind of step")
    return steps(dtype, int(threads), cast("StepKind", kind), int(groups), int(count))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--only", choices=("step", "compared", "around"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, choices=(1, 2))
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        sys.stdout.write(json.dumps(measure(*given.measure)) + "\n")
    else:
        main(given.json, given.only, given.dtype, given.threads)
