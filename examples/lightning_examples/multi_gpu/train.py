"""`python -m lightning_examples.multi_gpu.train NAME --data FOLDER --cluster 1x8`; README.md has what comes before it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

import lightning
from lightning.cli.train import read_tasks

from lightning_examples.multi_gpu.recipe import CLUSTERS, TRAIN, VAL, Recipe

RECIPES = ("spider", "musique", "calcx")


def recipe(name: str) -> Recipe:
    """A recipe by its folder's name. Imported on use: it brings the agent's framework."""
    return cast("Recipe", import_module(f"lightning_examples.multi_gpu.{name}.recipe").RECIPE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or with `--dev` try the agent on a few tasks without training."""
    options = _options(arguments)
    chosen = recipe(options.name)
    trainer = lightning.Trainer(
        options.model,
        chosen.algorithm(),
        train_agents=chosen.train_agents,
        engine="verl",
        store=options.store,
        out=options.out,
        resume=options.resume,
        config=chosen.config(options.cluster, options.set),
    )
    agent, tasks = chosen.agent(options.data), read_tasks(options.data / TRAIN)
    if options.dev:
        raise SystemExit(0 if trainer.dev(agent, tasks).ok else 1)
    trainer.fit(agent, train=tasks, val=read_tasks(options.data / VAL))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--data", type=Path, required=True, help="the folder that the recipe's `prepare` has filled")
    parser.add_argument("--cluster", choices=CLUSTERS, default="1x8", help="nodes x GPUs")
    parser.add_argument("--model", default="Qwen/Qwen3-4B", help="Qwen/Qwen3-4B, Qwen/Qwen3-8B, or a folder")
    parser.add_argument("--out", type=Path, help="the run's folder; on two nodes one that both see")
    parser.add_argument("--store", help="the database, when the run's folder is no place for SQLite (a network share)")
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, help="go on with the run in --out also under other settings"
    )
    parser.add_argument("--dev", action="store_true", help="a dry run: a few tasks, a report, no training")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
