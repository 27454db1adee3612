"""Which policy answers a call, and the check that policies can stand beside each other.

The invariant: a call has one policy. Settings under which an agent certainly has two are refused when they are read. Globs that
overlap for some agents alone are found at the call of such an agent, which the gateway refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Final

from lightning.errors import ConfigError
from lightning.trainer.training_data import NOT, OF_MODEL, OF_POLICY, is_trainable
from lightning.types import POLICY, Caller

if TYPE_CHECKING:
    from lightning_policies.config import PolicyConfig

BASE: Final = "base"
"""The name of the untrained model, as the policy of agents that no policy names."""
RESERVED: Final[Mapping[str, str]] = {
    POLICY: "the single policy of a run without [policies]",
    BASE: "the untrained model, which answers agents that no policy names",
    "adapters": "the folder of all policies' adapters in an exported model",
}
"""Names that no policy may have, each with its meaning."""
WILD: Final = frozenset("*?[")
"""The characters with which a glob matches several names."""


def globs_of(policy: PolicyConfig) -> tuple[str, ...]:
    """Return the globs of a policy's calls in the spelling of `train_agents`."""
    return (*policy.agents, *(f"{OF_MODEL}{glob}" for glob in policy.models))


def policies_of(policies: Mapping[str, PolicyConfig], caller: Caller, model: str) -> list[str]:
    """Return the names of the policies that have a call of this agent, which asks for this model."""
    return [name for name, policy in policies.items() if is_trainable(caller, globs_of(policy), model)]


def policy_of(policies: Mapping[str, PolicyConfig], caller: Caller, model: str) -> str:
    """Return the name of the policy that has a call of this agent, which asks for this model; `BASE` if none has it. Raises
    `ConfigError` if several have it."""
    found = policies_of(policies, caller, model)
    if len(found) > 1:
        names = " and ".join(f"policies.{name}" for name in found)
        asked = f" (model {model!r})" if model else ""
        raise ConfigError(
            f"The call of the agent {caller.name!r}{asked} matches {names}, and a call has one policy: take the agent out of "
            f"all but one with a glob such as '!{caller.name}' in policies.{found[-1]}.agents."
        )
    return found[0] if found else BASE


def check_policies(policies: Mapping[str, PolicyConfig]) -> None:
    """Raise `ConfigError` for a name that no policy can have, a policy without calls or with settings that have no effect, an
    agent with two policies, and policies of which none is trained."""
    for name, policy in policies.items():
        if why := _why_no_name(name) or _why_not(name, policy):
            raise ConfigError(why)
    if twice := next(_of_two(policies), ""):
        raise ConfigError(twice)
    if not any(policy.train for policy in policies.values()):
        raise ConfigError(
            f"no policy is trained: train = false for {', '.join(f'policies.{name}' for name in policies)}. Leave it out for a "
            "policy that is to learn; `lightning eval` measures agents without training"
        )


def _why_no_name(name: str) -> str:
    """Return why a policy cannot have this name; empty if it can."""
    if name in RESERVED:
        return f"[policies.{name}]: {name!r} names {RESERVED[name]}: give the policy another name"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return (
            f"[policies.{name}]: a policy's name has letters, digits and underscores alone, and no digit first, because "
            f"folders and metrics are named after it; agents = [{name!r}] takes an agent of any name"
        )
    return ""


def _why_not(name: str, policy: PolicyConfig) -> str:
    """Return why a policy cannot be as its settings say; empty if it can."""
    place = f"policies.{name}"
    if not globs_of(policy):
        return (
            f"[{place}] has no agents: set {place}.agents, with globs on the caller path, or {place}.models, with globs on the "
            "model that a call asks for"
        )
    for glob in policy.agents:
        if not glob.removeprefix(NOT):
            return f"{place}.agents has {glob!r}, which matches no agent: leave it out"
        if glob.removeprefix(NOT).startswith((OF_MODEL, OF_POLICY)):
            return f"{place}.agents has {glob!r}: only globs on agents belong there, globs on models in {place}.models"
    for glob in policy.models:
        if not glob or glob.startswith((NOT, OF_MODEL, OF_POLICY)):
            return f"{place}.models has {glob!r}: give a glob on the requested model, such as 'gpt-*'"
    if policy.base is not None and not policy.base.strip():
        return f"{place}.base is empty: name a model's folder, or a model on the Hugging Face Hub, or leave it out"
    if without := [key for key in ("lora", "lr") if not policy.train and getattr(policy, key) is not None]:
        return f"{place}.{without[0]} has no effect with {place}.train = false: leave one of the two out"
    return ""


def _of_two(policies: Mapping[str, PolicyConfig]) -> Iterator[str]:
    """Yield an error for each agent or requested model that certainly belongs to two policies."""
    for (first, one), (second, other) in combinations(policies.items(), 2):
        for key, globs, others in (("agents", one.agents, other.agents), ("models", one.models, other.models)):
            for glob in globs:
                if glob in others and not glob.startswith(NOT):
                    yield (
                        f"policies.{first}.{key} and policies.{second}.{key} both have {glob!r}, and a call has one policy: "
                        "take it out of one of the two"
                    )
    for (first, one), (second, other) in permutations(policies.items(), 2):
        pair = {first: one, second: other}
        for name in filter(is_name, one.agents):
            path = tuple(name.split("/"))
            if len(policies_of(pair, Caller(path[-1], path), "")) > 1:
                yield (
                    f"the agent {name!r} of policies.{first}.agents belongs to policies.{second} as well, and a call has one "
                    f"policy: take it out there with {NOT + name!r} in policies.{second}.agents"
                )
        for model in filter(is_name, one.models):
            if any(fnmatchcase(model, glob) for glob in other.models):
                yield (
                    f"the model {model!r} of policies.{first}.models belongs to policies.{second} as well, and a call has one "
                    f"policy: change policies.{second}.models"
                )


def is_name(glob: str) -> bool:
    """Return whether a glob matches a single name."""
    return not glob.startswith(NOT) and not WILD & set(glob)
