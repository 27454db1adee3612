"""The tree step beside one row for each call and beside rows that merge the calls of a rollout.

Three shapes of groups on one model, all three kinds of step taking turns in one process. `efficiency` is the speed-up over one
row for each call, divided by how often the average token is repeated: 1 would mean that a step costs what its unique tokens
cost. Then the tree step's memory, each number from a process of its own: of trees of one size whose paths get longer, and of
trees whose paths stay but become more. Then assembly: recorded tokens (prompt and response of each call) per CPU-second from
rows to a prefix tree, and on to packed tensors, beside TRL's packer where `--trl` names a Python that has TRL.

    python tests/bench/bench_tree.py [--json FILE] [--trl PYTHON] [--only steps|memory|assembly]

On a GPU only the steps are measured, in seconds of a clock, with a model of 0.6 billion random weights in bfloat16:

    python tests/bench/bench_tree.py --device cuda
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning.batch import Sample, Trajectory, build_samples
from lightning.batch.radix import build_tree
from lightning.config.sections import StepKind
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.rows import by_call, states_of, trained_length, trained_tokens
from lightning.engines.torch.engine import TorchEngine
from lightning.engines.torch.layouts import Forest
from lightning.engines.torch.path_attention import pack_tree
from lightning.losses.correction import NO_CORRECTION
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.testing.trajectories import make_trajectory

ROOT = Path(__file__).parents[2]
TRL = ROOT / ".venv-trl" / "bin" / "python"
"""The environment that `make compare` builds."""
VOCABULARY, HIDDEN, LAYERS = 2048, 256, 4
REPEATS = 3
BUDGET = 512
"""Of the memory's measurements: tokens whose activations are kept."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`rollouts` of one task with `turns` calls each: tokens of the shared prompt, of each response, and between two turns."""

    rollouts: int
    turns: int
    prompt: int
    response: int
    observation: int

    @property
    def name(self) -> str:
        return f"{self.rollouts}x{self.turns}_prompt{self.prompt}_response{self.response}"


STEPS = (
    Shape(8, 4, 256, 24, 40),
    Shape(8, 8, 512, 24, 40),
    Shape(16, 2, 1024, 32, 32),
    Shape(16, 2, 1024, 16, 16),
)
GPU_STEPS = (
    Shape(8, 4, 1024, 128, 128),
    Shape(16, 8, 2048, 128, 128),
    Shape(16, 1, 4096, 256, 0),
    Shape(32, 1, 256, 256, 0),
)
LONG = Shape(8, 16, 4096, 256, 256)
PATHS = (Shape(1, 1, 992, 32, 0), Shape(1, 1, 2016, 32, 0), Shape(1, 1, 4064, 32, 0), Shape(1, 1, 8160, 32, 0))
WIDTHS = (Shape(1, 1, 992, 32, 0), Shape(4, 1, 32, 992, 0), Shape(16, 1, 32, 992, 0), Shape(64, 1, 32, 992, 0))
PEAKS: tuple[StepKind, ...] = ("tree", "linear")


def group(shape: Shape) -> list[Trajectory]:
    """Rollouts of one task: the same prompt, then everyone for himself."""
    generator = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        found: list[int] = generator.integers(0, VOCABULARY, count).tolist()
        return found

    shared = ids(shape.prompt)
    made = []
    for index in range(shape.rollouts):
        context, calls = list(shared), []
        for _ in range(shape.turns):
            response = ids(shape.response)
            calls.append((tuple(context), tuple(response)))
            context += [*response, *ids(shape.observation)]
        made.append(make_trajectory(calls, rollout=f"rollout-{index}", index=index))
    return made


def rows_of(shape: Shape) -> tuple[Sample, ...]:
    """A group's rows, alternately praised and blamed."""
    return build_samples(group(shape), [[(-1.0) ** index] * shape.turns for index in range(shape.rollouts)])


def make_model(folder: Path, device: str = "cpu") -> Path:
    """Qwen3 with random weights: 4 layers of size 256, heads of 64; on a GPU the shape of Qwen3-0.6B."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    small = device == "cpu"
    config = Qwen3Config(
        vocab_size=VOCABULARY if small else 151_936,
        hidden_size=HIDDEN if small else 1024,
        intermediate_size=3 * HIDDEN if small else 3072,
        num_hidden_layers=LAYERS if small else 28,
        num_attention_heads=HIDDEN // 64 if small else 16,
        num_key_value_heads=HIDDEN // 128 if small else 8,
        head_dim=64 if small else 128,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def cheapest(ways: dict[str, Callable[[], object]], clock: Callable[[], float] = time.process_time) -> dict[str, float]:
    """Seconds of each way's cheapest repeat; the ways take turns, so that a busy machine slows all of them."""
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            began = clock()
            way()
            costs[name].append(clock() - began)
    return {name: min(own) for name, own in costs.items()}


def step_costs(
    model: Path, samples: Sequence[Sample], kinds: Sequence[StepKind], device: str = "cpu", budget: int = 8192
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Seconds of one optimizer step of each kind (of the CPU, or by the clock on a GPU), and what its first step reported."""
    engines = {kind: TorchEngine(device=device, step=kind, tokens_per_microbatch=budget) for kind in kinds}
    loss = ClippedPolicyGradient(correction=NO_CORRECTION)
    clock = time.process_time if device == "cpu" else time.perf_counter
    first = {}
    for kind, engine in engines.items():
        engine.open(model, OptimizerConfig(lr=1e-6), seed=0)
        began = clock()
        found = engine.step(samples, loss).metrics  # also the warm-up
        assert found["tree"] == (kind == "tree")
        first[kind] = {"grad_norm": found["grad_norm"], "seconds": clock() - began}
    cost = cheapest({kind: partial(engine.step, samples, loss) for kind, engine in engines.items()}, clock)
    for engine in engines.values():
        engine.close()
    return cost, first


def steps(model: Path, shape: Shape, device: str = "cpu", budget: int = 8192) -> dict[str, float]:
    """One optimizer step, by call, by row and over the tree."""
    samples = rows_of(shape)
    recorded = sum(span.stop for sample in samples for span in sample.spans)
    unique = len(build_tree([sample.ids for sample in samples]).ids)
    cost, first = step_costs(model, samples, ("per-call", "linear", "tree"), device, budget)
    norms = [of["grad_norm"] for of in first.values()]
    return {
        "tokens_recorded": recorded,
        "tokens_unique": unique,
        **{f"{kind}_{'cpu_' if device == 'cpu' else ''}seconds": seconds for kind, seconds in cost.items()},
        "tree_first_step_seconds": first["tree"]["seconds"],
        "repeated": recorded / unique,
        "faster_than_per_call": cost["per-call"] / cost["tree"],
        "faster_than_linear": cost["linear"] / cost["tree"],
        "efficiency": cost["per-call"] / cost["tree"] / (recorded / unique),
        "gradient_norm_difference": (max(norms) - min(norms)) / min(norms),
    }


def overhead(model: Path) -> dict[str, float]:
    """What the tree costs where nothing is shared: tokens' worth of CPU for each row, beside rows in a rectangle."""
    generator = np.random.default_rng(0)
    found = {}
    for count, length in ((64, 32), (8, 256)):
        halves = generator.integers(0, VOCABULARY, (count, 2, length // 2)).tolist()
        made = [make_trajectory([pair], rollout=f"rollout-{index}", index=index) for index, pair in enumerate(halves)]
        samples = build_samples(made, [[(-1.0) ** index] for index in range(count)])
        cost, _ = step_costs(model, samples, ("linear", "tree"))
        per_token = cost["linear"] / (count * length)
        found[f"{count}_rows_of_{length}_tokens_per_run"] = (cost["tree"] - cost["linear"]) / count / per_token
    return found


def peak(model: Path, shape: Shape, kind: StepKind) -> float:
    """MiB that a step needs beyond what the process had before it. Meant for a process of its own."""
    engine = TorchEngine(device="cpu", step=kind, tokens_per_microbatch=BUDGET)
    engine.open(model, OptimizerConfig(lr=1e-6), seed=0)
    # The optimizer's state, and what torch loads.
    engine.step(rows_of(Shape(2, 1, 16, 16, 0)), ClippedPolicyGradient(correction=NO_CORRECTION))
    samples = rows_of(shape)
    gc.collect()
    before = forget_peak()
    engine.step(samples, ClippedPolicyGradient(correction=NO_CORRECTION))
    if (needed := peak_mib() - before) <= 0:
        raise RuntimeError(f"nothing was measured: a step of {shape.name} by {kind} needed {needed:g} MiB")
    return needed


def forget_peak() -> float:
    """Begin a new peak (proc(5), clear_refs); returns MiB that are in use now. `ru_maxrss` will not do: it has no such
    beginning, and that of a child is its parent's where that was larger."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mib()


def peak_mib() -> float:
    """The most MiB that this process has had since `forget_peak`."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]


def memory(model: Path) -> dict[str, float]:
    """Peak memory of steps over longer paths, and over more paths."""
    found = {}
    for name, shapes in (("path", PATHS), ("width", WIDTHS)):
        for shape in shapes:
            tokens = shape.rollouts * shape.response + shape.prompt
            for kind in PEAKS:
                command = [sys.executable, __file__, "--peak", str(model), json.dumps(_numbers(shape)), kind]
                ran = subprocess.run(command, check=True, capture_output=True, text=True)
                found[f"{name}_{tokens}_tokens_{kind}_mib"] = float(ran.stdout.splitlines()[-1])
    return found


def _numbers(shape: Shape) -> list[int]:
    return [shape.rollouts, shape.turns, shape.prompt, shape.response, shape.observation]


TRL_SCRIPT = """
import sys, time
import numpy as np
from trl.experimental.async_grpo.packing import TreeRow
data = np.load(sys.argv[1])
edges = np.cumsum(data["lengths"])[:-1]
split = lambda name: np.split(data[name], edges)
samples = [
    {"input_ids": ids, "completion_mask": mask, "old_log_probs": logps, "advantage": 1.0, "group_id": 0}
    for ids, mask, logps in zip(split("ids"), split("mask"), split("logps"))
]
costs = []
for _ in range(2):
    began = time.process_time()
    row = TreeRow()
    for sample in samples:
        row.add(sample)
    row.pack()
    costs.append(time.process_time() - began)
print(min(costs), len(row.tokens))
"""


def by_trl(python: Path, rows: list[Sample], folder: Path) -> tuple[float, int]:
    """CPU-seconds of TRL's packer on the same rows, called from its own package in its own environment, and its tokens."""
    np.savez(
        folder / "rows.npz",
        lengths=[len(row) for row in rows],
        ids=np.concatenate([row.ids for row in rows]),
        mask=np.concatenate([row.weights != 0 for row in rows]).astype(np.int64),
        logps=np.concatenate([row.logprobs for row in rows]),
    )
    command = [str(python), "-c", TRL_SCRIPT, str(folder / "rows.npz")]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, tokens = ran.stdout.splitlines()[-1].split()
    return float(seconds), int(tokens)


def assembly(shape: Shape, trl: Path | None, folder: Path) -> dict[str, float]:
    """From rows, one for each call, to a tree, and to the tensors of its packs."""
    merged = rows_of(shape)
    single = [row for sample in merged for row in by_call(sample)]
    recorded = sum(map(len, single))

    def forest(rows: list[Sample] | tuple[Sample, ...]) -> Forest:
        return Forest.of(rows, list(map(trained_length, rows)), trained_tokens(rows), states_of(rows, every=False))

    def packed() -> list[tuple[np.ndarray, np.ndarray]]:
        made = forest(single)
        packs = pack_tree(made.tree, [True] * len(made.tree.nodes), 1 << 30)
        return [(pack.ids(made.tree), pack.positions()) for pack in packs]

    trajectories = group(shape)
    cost = cheapest({
        "tree": lambda: build_tree([row.ids for row in single]),
        "packed": packed,
        "linear": lambda: build_samples(trajectories, [[1.0] * shape.turns] * shape.rollouts),
    })  # fmt: skip
    found: dict[str, float] = {
        "recorded_tokens": recorded,
        "unique_tokens": len(build_tree([row.ids for row in single]).ids),
    }
    found |= {f"{name}_tokens_per_cpu_second": recorded / seconds for name, seconds in cost.items()}
    if trl is not None:
        seconds, tokens = by_trl(trl, single, folder)
        found |= {"trl_tokens_per_cpu_second": recorded / seconds, "trl_tokens": tokens}
        found["packed_faster_than_trl"] = seconds / cost["packed"]
    return found


def main(
    out: Path | None = None, trl: Path | None = None, only: str | None = None, device: str = "cpu", budget: int = 8192
) -> dict[str, float]:
    """Measure, print a table, write JSON to `out`."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", device)
        if only in (None, "steps"):
            for shape in STEPS if device == "cpu" else GPU_STEPS:
                found |= {
                    f"step_{shape.name}_{key}": value for key, value in steps(model, shape, device, budget).items()
                }
        if only in (None, "steps") and device == "cpu":
            found |= {f"overhead_{key}": value for key, value in overhead(model).items()}
        if only in (None, "memory"):
            found |= {f"memory_{key}": value for key, value in memory(model).items()}
        if only in (None, "assembly"):
            found |= {f"assembly_{key}": value for key, value in assembly(LONG, trl, folder).items()}
    sys.stdout.write("".join(f"{key:<60}{value:>16,.6g}\n" for key, value in found.items()))
    if out is not None:
        out.write_text(json.dumps(found, indent=2))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--trl", type=Path, default=TRL if TRL.exists() else None, help="a Python that has TRL")
    parser.add_argument("--only", choices=("steps", "memory", "assembly"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budget", type=int, default=8192, help="engine.tokens_per_microbatch of the steps")
    parser.add_argument("--peak", nargs=3, metavar=("MODEL", "SHAPE", "KIND"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        sys.stdout.write(f"{peak(Path(given.peak[0]), Shape(*json.loads(given.peak[1])), given.peak[2])}\n")
    else:
        main(given.json, given.trl, given.only if given.device == "cpu" else "steps", given.device, given.budget)
