"""The file of a sweep: which runs it asks for, each as the arguments of one `lightning train`.

train = "my_agent:solve --model models/tiny --tasks train.jsonl --val val.jsonl"
seeds = [0, 1, 2]

[settings]                      # every combination of these
"engine.lr" = [1e-6, 5e-6]

[variants]                      # and of each of these; more arguments of `lightning train`
grpo = "--algorithm grpo"
ppo = "--algorithm ppo --set engine.critic_lr=1e-4"
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.errors import ConfigError
from lightning.text_files import read_text

KEYS = frozenset({"train", "seeds", "settings", "variants"})
OURS = ("--out", "--resume", "--dev", "-h", "--help")
"""Arguments of `lightning train` that a sweep gives itself, or that make no run."""
MOST_RUNS = 1000


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run. Runs of one `variant` differ in the seed alone; `name` is the run's folder below the sweep's."""

    name: str
    variant: str
    seed: int
    arguments: tuple[str, ...]


def read_sweep(file: Path) -> list[PlannedRun]:
    """The runs of a file, seed by seed: a sweep that is stopped early has compared all variants. Raises `ConfigError`."""
    try:
        content = tomllib.loads(read_text(file, ConfigError))
    except OSError as error:
        raise ConfigError(f"cannot read the sweep: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    unknown = sorted(set(content) - KEYS)
    if unknown:
        raise ConfigError(f"{file} has {', '.join(unknown)}: a sweep knows {', '.join(sorted(KEYS))}")
    train = _arguments(file, "train", content.get("train"))
    seeds = content.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise ConfigError(f"{file}: seeds is a list of whole numbers, such as [0, 1, 2]")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"{file}: a seed is there twice")
    variants = _variants(file, content)
    runs = [
        PlannedRun(f"{name}-seed{seed}", name, seed, (*train, *more, "--set", f"trainer.seed={seed}"))
        for seed in seeds
        for name, more in variants.items()
    ]
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"{file} asks for {len(runs)} runs, more than {MOST_RUNS}: split it")
    return runs


def _arguments(file: Path, key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            found = shlex.split(value)
        except ValueError as error:
            raise ConfigError(f"{file}: {key} cannot be cut into arguments: {error}") from error
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        found = value
    else:
        raise ConfigError(f"{file}: {key} has the arguments of `lightning train`, as one text or a list of texts")
    if key == "train" and found[:2] == ["lightning", "train"]:
        found = found[2:]
    for argument in found:
        if argument.partition("=")[0] in OURS:
            raise ConfigError(
                f"{file}: {key} has {argument}, which is not for a sweep: it gives each run its own folder"
            )
        if argument.startswith("trainer.seed="):
            raise ConfigError(f"{file}: {key} sets trainer.seed: seeds = [...] does")
    return tuple(found)


def _variants(file: Path, content: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Names and arguments of all combinations."""
    settings, named = content.get("settings", {}), content.get("variants", {})
    if not isinstance(settings, dict) or not isinstance(named, dict):
        raise ConfigError(f"{file}: settings and variants are tables")
    choices: list[Sequence[tuple[str, tuple[str, ...]]]] = []
    if named:
        choices.append([(_word(name), _arguments(file, f"variants.{name}", value)) for name, value in named.items()])
    for key, values in settings.items():
        if isinstance(values, dict):
            raise ConfigError(f'{file}: write "{key}.{next(iter(values), "")}" = [...] in quotes, below [settings]')
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{file}: settings.{key} is a list of values to try")
        choices.append(
            [(f"{key.rpartition('.')[2]}={_word(value)}", ("--set", f"{key}={_value(value)}")) for value in values]
        )
    found: dict[str, tuple[str, ...]] = {}
    for combination in itertools.product(*choices):
        name = "-".join(name for name, _ in combination) or "run"
        if name in found:
            raise ConfigError(f"{file}: two variants are called {name}: give them other names or values")
        found[name] = tuple(argument for _, arguments in combination for argument in arguments)
    return found


def _value(value: object) -> str:
    """As `--set` takes it: a text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _word(value: object) -> str:
    """What may be part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "_", _value(value)).strip("_")[:60] or "empty"
