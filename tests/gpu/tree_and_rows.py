"""Seconds of one optimizer step on a GPU by rows, over the tree, and as `engine.step = "auto"` chooses; the gradient is one.

The groups and the model are those of `tests/bench/bench_tree.py`.

    python -m tests.gpu.tree_and_rows FIGURES.json [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.batch import Sample
    from lightning.config.sections import StepKind

ROUGH = 0.1
"""Between gradient norms of bfloat16 in different orders of sums."""
KINDS: tuple[StepKind, ...] = ("linear", "tree", "auto")


def of_kind(model: Path, samples: Sequence[Sample], kind: StepKind, device: str, repeats: int) -> dict[str, float]:
    """One engine's: the first step, which compiles, and the fastest of the others."""
    from lightning.engines.protocol import OptimizerConfig
    from lightning.engines.torch.engine import TorchEngine
    from lightning.losses.correction import NO_CORRECTION
    from lightning.losses.policy_gradient import ClippedPolicyGradient

    loss = ClippedPolicyGradient(correction=NO_CORRECTION)
    engine = TorchEngine(device=device, step=kind)
    engine.open(model, OptimizerConfig(lr=1e-6), seed=0)
    try:
        took, told = [], []
        for _ in range(1 + repeats):
            began = time.perf_counter()
            told.append(engine.step(samples, loss).metrics)
            took.append(time.perf_counter() - began)
        first = {"tree": told[0]["tree"], "grad_norm": told[0]["grad_norm"]}
        return {"first_seconds": took[0], "seconds": min(took[1:]), **first}
    finally:
        engine.close()


def measure(folder: Path, device: str, repeats: int = 3) -> dict[str, object]:
    """The figures. Raises `AssertionError` if the kinds of a step disagree about the gradient."""
    from tests.bench import bench_tree

    model = bench_tree.make_model(folder / "model", device)
    shapes = bench_tree.GPU_STEPS if device == "cuda" else (bench_tree.Shape(4, 2, 64, 16, 16),)
    found: dict[str, object] = {}
    for shape in shapes:
        samples = bench_tree.rows_of(shape)
        kinds = {kind: of_kind(model, samples, kind, device, repeats) for kind in KINDS}
        best = min(kinds["linear"]["seconds"], kinds["tree"]["seconds"])
        chosen = {"auto_chose": "tree" if kinds["auto"]["tree"] else "rows"}
        found[shape.name] = {**kinds, **chosen, "auto_over_best": kinds["auto"]["seconds"] / best}
        norms = [each["grad_norm"] for each in kinds.values()]
        assert max(norms) <= (1 + ROUGH) * min(norms), found
        assert kinds["tree"]["tree"] == 1.0, "the tree step was not taken"
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        given.figures.write_text(json.dumps(measure(Path(name), given.device), indent=1))
