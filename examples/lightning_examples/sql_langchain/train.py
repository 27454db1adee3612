"""Train this folder's agent: `python -m lightning_examples.sql_langchain.train`, on Spider with `--spider PATH`."""

from __future__ import annotations

import argparse

import lightning

from lightning_examples.sql_langchain import MODEL
from lightning_examples.sql_langchain.agent import agent
from lightning_examples.sql_langchain.spider import read_spider
from lightning_examples.sql_langchain.tasks import tasks, val_tasks


def main() -> None:
    """Without Spider some minutes on two cores, with it some hours on a GPU; everything goes to `runs/`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spider", metavar="PATH", help="the folder that Spider's archive unpacks to")
    parser.add_argument("--model", help="a model's folder or name; with Spider a real one")
    options = parser.parse_args()
    trained = ["write", "rewrite"]
    if options.spider:
        model = options.model or "Qwen/Qwen2.5-Coder-1.5B-Instruct"
        grpo = lightning.LightningRL("grpo", group_size=4)
        trainer = lightning.Trainer(model, grpo, train_agents=trained, steps=432, tasks_per_step=32, lr=1e-6)
        trainer.fit(agent, read_spider(options.spider, "train"), read_spider(options.spider, "dev", limit=500))
    else:
        grpo = lightning.LightningRL("grpo", group_size=8, normalization="token-mean")
        model = options.model or MODEL
        trainer = lightning.Trainer(model, grpo, train_agents=trained, steps=25, tasks_per_step=16, lr=2e-3)
        trainer.fit(agent, tasks(4000, seed=0), val_tasks(200))


if __name__ == "__main__":
    main()
