"""Train this folder's agent: `python -m lightning_examples.quest_python.train`."""

from __future__ import annotations

import lightning
from lightning.config import Config, with_settings

from lightning_examples.quest_python.agent import agent
from lightning_examples.quest_python.demo import SETTINGS, algorithm
from lightning_examples.quest_python.tasks import tasks, val_tasks
from lightning_examples.smollm2 import model_folder


def main() -> None:
    """Some minutes on two cores; everything goes to `runs/`."""
    trainer = lightning.Trainer(model_folder(), algorithm(), config=with_settings(Config(), SETTINGS))
    trainer.fit(agent, train=tasks(4000, seed=0), val=val_tasks(200))


if __name__ == "__main__":
    main()
