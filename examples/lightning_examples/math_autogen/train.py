"""Train this folder's agent: `python -m lightning_examples.math_autogen.train [--gsm8k FILE --model M]`."""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
from lightning.config import Config, load_config, with_settings

from lightning_examples.demonstrations import algorithm
from lightning_examples.math_autogen import MODEL
from lightning_examples.math_autogen.agent import agent
from lightning_examples.math_autogen.demo import SETTINGS
from lightning_examples.math_autogen.tasks import read_gsm8k, split, tasks, val_tasks

FULL_SIZE = Path(__file__).with_name("full_size.toml")


def main() -> None:
    """The tiny model on generated problems, unless data or another model is given; everything goes to `runs/`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path, help="GSM8K as JSON lines; one question in eight is held out")
    parser.add_argument("--model", help=f"model folder, or its name on a model hub; trained as {FULL_SIZE.name} says")
    options = parser.parse_args()
    train, val = split(read_gsm8k(options.gsm8k)) if options.gsm8k else (tasks(240, seed=0), val_tasks(200))
    config = load_config(FULL_SIZE) if options.model else load_config(base=with_settings(Config(), SETTINGS))
    trainer = lightning.Trainer(options.model or MODEL, algorithm(), config=config)
    trainer.fit(agent, train=train, val=val[:200])


if __name__ == "__main__":
    main()
