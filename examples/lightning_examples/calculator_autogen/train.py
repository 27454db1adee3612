"""Train this folder's agent: `python -m lightning_examples.calculator_autogen.train`."""

from __future__ import annotations

import lightning

from lightning_examples.calculator_autogen.agent import agent
from lightning_examples.calculator_autogen.tasks import tasks, val_tasks
from lightning_examples.smollm2 import model_folder


def main() -> None:
    """Some minutes on two cores; everything goes to `runs/`."""
    trainer = lightning.Trainer(
        model_folder(),
        lightning.LightningRL("grpo", group_size=8, entropy_coefficient=0.005),
        steps=8,
        tasks_per_step=8,
        lr=1.5e-5,
    )
    trainer.fit(agent, train=tasks(4000, seed=0), val=val_tasks(200))


if __name__ == "__main__":
    main()
