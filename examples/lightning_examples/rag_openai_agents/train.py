"""Train this folder's agent: `python -m lightning_examples.rag_openai_agents.train`; MuSiQue is in ../paper."""

from __future__ import annotations

import lightning

from lightning_examples.rag_openai_agents import MODEL
from lightning_examples.rag_openai_agents.agent import agent
from lightning_examples.rag_openai_agents.tasks import tasks, val_tasks


def main() -> None:
    """Some minutes on two cores; everything goes to `runs/`."""
    algorithm = lightning.LightningRL("grpo", group_size=8, normalization="token-mean")
    trainer = lightning.Trainer(MODEL, algorithm, steps=15, tasks_per_step=16, lr=2e-3)
    trainer.fit(agent, train=tasks(240, seed=0), val=val_tasks(200))


if __name__ == "__main__":
    main()
