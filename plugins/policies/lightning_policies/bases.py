"""Which policies one vLLM answers, and the models that these vLLMs are started with.

The invariant: policies that are not trained, and policies of which adapters are trained, share the vLLMs of their base model. A
policy of which all weights are trained has vLLMs of its own. The run's model is served untrained only where a policy needs
that: a vLLM that no policy needs would take its GPUs from the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.errors import ConfigError
from lightning.trainer.model import resolve_model

from lightning_policies.calls import BASE

if TYPE_CHECKING:
    from lightning.config import LoraConfig

    from lightning_policies.config import PolicyConfig


@dataclass(frozen=True, slots=True)
class Served:
    """The policies that one vLLM answers. `base` is the model that it starts with (None: the run's), `adapters` are those of
    each policy with trained adapters, `whole` is the policy of which all weights are trained ("": none), and `untrained` are
    the names of the other policies."""

    base: str | None
    adapters: Mapping[str, LoraConfig]
    whole: str
    untrained: tuple[str, ...]

    @property
    def trained(self) -> tuple[str, ...]:
        """The trained policies, in the order of their names."""
        return (self.whole,) if self.whole else tuple(sorted(self.adapters))


def served_of(policies: Mapping[str, PolicyConfig], lora: LoraConfig | None) -> list[Served]:
    """Return the policies of each vLLM of a run with `engine.lora`. `BASE` is among them where the run's model is served
    untrained."""
    shared: dict[str | None, list[str]] = {}
    whole: list[Served] = []
    for name, policy in policies.items():
        if policy.train and (policy.lora or lora) is None:
            whole.append(Served(named(policy.base), {}, name, ()))
        else:
            shared.setdefault(named(policy.base), []).append(name)
    found = []
    for base, names in sorted(shared.items(), key=lambda item: item[0] is not None):
        adapters = {name: own for name in names if policies[name].train and (own := policies[name].lora or lora)}
        untrained = tuple(name for name in names if name not in adapters)
        found.append(Served(base, adapters, "", untrained if base else (*untrained, BASE)))
    return [*found, *whole]


def named(base: str | None) -> str | None:
    """Return the name of a policy's base, which is the same for two spellings of the same folder."""
    folder = Path(base).expanduser() if base else None
    return base if folder is None or not folder.is_dir() else str(folder.resolve())


def folders_of(bases: Iterable[str | None], model: Path) -> dict[str | None, Path]:
    """Return the folder of each base, which is fetched from the hub if it is not here, in a run that trains `model`. Raises
    `ConfigError` for a base that does not exist, that is the run's model, or that has another name as well."""
    found: dict[str | None, Path] = {None: model}
    for base in sorted({base for base in bases if base is not None}):
        folder = resolve_model(base).resolve()
        for other, known in found.items():
            if known.resolve() == folder:
                raise ConfigError(
                    f"policies.NAME.base = {base!r} is the run's model: leave it out, the policy then begins as that model"
                    if other is None
                    else f"policies.NAME.base = {base!r} and {other!r} are the same model: write it in one way"
                )
        found[base] = folder
    return found


def is_base_served(policies: Mapping[str, PolicyConfig], lora: LoraConfig | None) -> bool:
    """Return whether a run with `engine.lora` serves its model untrained, for agents that no policy names."""
    return any(BASE in served.untrained for served in served_of(policies, lora))
