"""Train this folder's agent: `python -m lightning_examples.rag_openai_agents.train [--musique PATH --model NAME]`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import lightning

from lightning_examples.rag_openai_agents import MODEL
from lightning_examples.rag_openai_agents.agent import Library, agent
from lightning_examples.rag_openai_agents.musique import read_musique
from lightning_examples.rag_openai_agents.retriever import bm25_of
from lightning_examples.rag_openai_agents.tasks import tasks, val_tasks


def main() -> None:
    """Some minutes on two cores with the shipped model; everything goes to `runs/`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--musique", type=Path, help="a file such as musique_ans_v1.0_train.jsonl")
    parser.add_argument("--model", default=str(MODEL))
    options = parser.parse_args()
    if options.musique:
        corpus = Path("runs/musique/corpus.jsonl")
        questions = read_musique(options.musique, corpus)
        researcher = partial(agent, library=Library(bm25_of(corpus), k=3))
        algorithm = lightning.LightningRL("grpo", group_size=4, clip_low=0.2, clip_high=0.3)
        trainer = lightning.Trainer(options.model, algorithm, steps=400, tasks_per_step=16, lr=1e-6)
        trainer.fit(researcher, train=questions[200:], val=questions[:200])
    else:
        algorithm = lightning.LightningRL("grpo", group_size=8, normalization="token-mean")
        trainer = lightning.Trainer(options.model, algorithm, steps=15, tasks_per_step=16, lr=2e-3)
        trainer.fit(agent, train=tasks(240, seed=0), val=val_tasks(200))


if __name__ == "__main__":
    main()
