"""Train this folder's agent: `python -m lightning_examples.sql_langchain.train`; Spider is in ../paper."""

from __future__ import annotations

import lightning

from lightning_examples.sql_langchain import MODEL
from lightning_examples.sql_langchain.agent import agent
from lightning_examples.sql_langchain.tasks import tasks, val_tasks


def main() -> None:
    """Some minutes on two cores; everything goes to `runs/`."""
    grpo = lightning.LightningRL("grpo", group_size=8, normalization="token-mean")
    trained = ["write", "rewrite"]
    trainer = lightning.Trainer(MODEL, grpo, train_agents=trained, steps=25, tasks_per_step=16, lr=2e-3)
    trainer.fit(agent, tasks(4000, seed=0), val_tasks(200))


if __name__ == "__main__":
    main()
