"""What an ablation varies: algorithms by their plugin names, each with the few arguments that make it the variant.

The invariant: a variant differs from the base, the demonstrations' own GRPO with identical credit, in what its name says and
in what that thing's paper fixes, and in nothing else.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from by_token import last_tokens, top_entropy
from lightning.algorithms.protocol import Algorithm
from lightning.demos import Demo
from lightning.errors import ConfigError
from lightning.losses.correction import NO_CORRECTION
from lightning.plugins import plugins

BASE = "grpo"


@dataclass(frozen=True, slots=True)
class Variant:
    """`arguments` go to the factory `algorithm`, or that the plugin name stands for, beside the group's size; `says` is its
    row in the table; `settings` are added to the demonstration's."""

    algorithm: str | Callable[..., Algorithm]
    arguments: Mapping[str, object]
    says: str
    settings: Mapping[str, object] = field(default_factory=dict)


_TOKENS = {"normalization": "token-mean"}
_BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
_DEMO: Mapping[str, object] = {**_TOKENS, **_BOUNDS}
"""What the demonstrations fix; low levels whose papers fix something else keep that."""

CREDITS: Mapping[str, Variant] = {
    BASE: Variant("grpo", {**_DEMO, "credit": "identical"}, "identical (the base)"),
    "discounted": Variant("grpo", {**_DEMO, "credit": "discounted"}, "discounted return-to-go"),
    "per-agent": Variant("grpo", {**_DEMO, "credit": "per-agent"}, "per agent"),
    "air": Variant("grpo", {**_DEMO, "credit": "intermediate", "tool_reward": {"error": -0.1}}, "AIR (failed tools -0.1)"),
    "leave-one-out": Variant("grpo", {**_DEMO, "credit": "leave-one-out"}, "leave-one-out on the tree"),
    "gigpo": Variant("grpo", {**_DEMO, "credit": "gigpo"}, "GiGPO"),
    "ppo": Variant("ppo", _DEMO, "critic, GAE over calls (PPO)"),
}  # fmt: skip
"""Who gets the credit within a rollout; the low level is GRPO, but for the critic's, which is PPO."""
LOW_LEVELS: Mapping[str, Variant] = {
    BASE: Variant("grpo", {**_DEMO, "credit": "identical"}, "GRPO (the base)"),
    "dr_grpo": Variant("dr_grpo", _BOUNDS, "Dr. GRPO"),
    "rloo": Variant("rloo", _DEMO, "RLOO"),
    "reinforce++": Variant("reinforce++", _DEMO, "REINFORCE++"),
    "dapo": Variant("dapo", {}, "DAPO (dynamic sampling)"),
    "gspo": Variant("gspo", {}, "GSPO"),
    "gspo-rloo": Variant("gspo", {"estimator": "rloo"}, "GSPO with RLOO's advantage"),
    "ppo": Variant("ppo", _DEMO, "PPO"),
}
"""How single calls are trained; credit is identical, but for PPO's critic."""
TOKENS: Mapping[str, Variant] = {
    BASE: Variant("grpo", {**_DEMO, "credit": "identical"}, "GRPO (the base)"),
    "last-tokens": Variant("grpo", {**_DEMO, "credit": last_tokens}, "the last eight tokens get the credit"),
    "top-entropy": Variant(top_entropy, _TOKENS, "the fifth of the tokens with the most entropy is trained"),
}
"""What differs within a call."""
MISMATCH: Mapping[str, Variant] = {
    BASE: Variant("grpo", {**_DEMO, "credit": "identical"}, "masked and dual-clipped (the base)"),
    "uncorrected": Variant("grpo", {**_DEMO, "correction": NO_CORRECTION}, "without a correction"),
    "icepop": Variant("grpo", {**_DEMO, "correction": "icepop"}, "IcePop"),
    "tis": Variant("grpo", {**_DEMO, "correction": "tis"}, "TIS"),
}
"""What is done about tokens on which trainer and sampler disagree: worth a run where they do (old weights, bfloat16)."""
LEARNABLE = "learnable"
ORDERS: Mapping[str, Variant] = {
    BASE: Variant("grpo", {**_DEMO, "credit": "identical"}, "shuffled (the base)"),
    LEARNABLE: Variant("grpo", {**_DEMO, "credit": "identical"}, "learnable", {"trainer.order": "learnable"}),
}
"""Which tasks a step takes: worth a run where there are fewer tasks than groups (`--train-tasks`)."""
SUITES: Mapping[str, Mapping[str, Variant]] = {
    "Credit": CREDITS, "Low level": LOW_LEVELS, "Within a call": TOKENS, "Mismatch": MISMATCH, "Order": ORDERS,
}  # fmt: skip
USUAL = (*CREDITS, *(name for name in LOW_LEVELS if name not in CREDITS))
"""The variants that run where none are named."""
VARIANTS: Mapping[str, Variant] = {**MISMATCH, **ORDERS, **TOKENS, **CREDITS, **LOW_LEVELS}


def choose(names: Sequence[str], own: Sequence[str]) -> dict[str, Variant]:
    """The variants of one call by name, each once: the known ones of `names`, and the user's own definitions (`parse`).

    Raises `ConfigError` for an unknown name and for what is no definition.
    """
    defined = dict(parse(text) for text in own)
    if unknown := [name for name in names if name not in VARIANTS and name not in defined]:
        raise ConfigError(f"there is no variant {unknown[0]!r}; known are {', '.join(VARIANTS)}, or define it by --own")
    return {name: VARIANTS[name] for name in names if name in VARIANTS} | defined


def parse(text: str) -> tuple[str, Variant]:
    """A user's own variant, such as `bold=grpo,credit=gigpo,entropy_coefficient=0.01`."""
    name, _, definition = text.partition("=")
    algorithm, *pairs = definition.split(",")
    if not name or not algorithm or name in VARIANTS or not all("=" in pair for pair in pairs):
        raise ConfigError(f"--own {text} is no variant: write NAME=ALGORITHM[,KEY=VALUE]..., with a name of its own")
    arguments = {key: _value(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    return name, Variant(algorithm, arguments, text.partition("=")[2])


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def build(variant: Variant, demo: Demo) -> Algorithm:
    """The algorithm, with the demonstration's group size. Raises `PluginError` for a name that nobody registered."""
    if isinstance(credit := variant.arguments.get("credit"), str):
        plugins().credit(credit)
    make = plugins().algorithm(variant.algorithm) if isinstance(variant.algorithm, str) else variant.algorithm
    try:
        return make(group_size=demo.algorithm().group_size, **variant.arguments)
    except TypeError as error:
        raise ConfigError(
            f"the algorithm {variant.algorithm!r} does not take {dict(variant.arguments)}: {error}"
        ) from error
