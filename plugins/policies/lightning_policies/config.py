"""The settings `[policies.NAME]`, the policies of a run with the agents that each of them answers, and `trainer.policy_turns`.

The invariant: they are read without what training imports, since every command reads the settings.
"""

from __future__ import annotations

from typing import ClassVar

from lightning.config import LoraConfig, NamedSettings, PluginSettings, Section
from lightning.errors import ConfigError
from pydantic import Field


class PolicyConfig(Section):
    """A policy: the agents that it answers, and how it is trained."""

    agents: tuple[str, ...] = ()
    """Agents that this policy answers, as globs on the caller path or the agent's name. A glob after `!` takes out what it
    matches."""
    models: tuple[str, ...] = ()
    """Globs on the model that a call asks for. Calls that match are this policy's, whatever agent they come from."""
    base: str | None = None
    """The model that the policy begins as, a folder or a name on the Hugging Face Hub; null is the run's model. Another model
    has vLLMs of its own, which the policies with this base share if their weights are not trained, or only their adapters."""
    lora: LoraConfig | None = None
    """The policy's adapters; null is `engine.lora`. If both are null all weights of the policy are trained, and the policy has
    vLLMs of its own."""
    lr: float | None = Field(default=None, gt=0)
    """The policy's learning rate, to which the schedule of `engine.lr` applies; null is `engine.lr`. The
    default of that fits the run's model, and adapters if every trained policy has some."""
    train: bool = True
    """Train the policy. If false it stays the untrained model, bit for bit."""


class PoliciesConfig(NamedSettings):
    """The policies of the run, each with the agents that it answers. Without a policy, one policy answers all agents. An agent
    that no policy names is answered by the untrained model and is not trained; it is refused where the run's model is not
    served untrained, because each policy has another base or trains all weights."""

    place: ClassVar[str] = "policies"
    of_training_state: ClassVar[tuple[str, ...]] = ("base", "lora", "train")
    of_run: ClassVar[tuple[str, ...]] = ("agents", "models", "base", "lora", "train")
    __pydantic_extra__: dict[str, PolicyConfig] = Field(init=False)

    def check(self) -> None:
        """Raise `ConfigError` for a name that no policy can have, a policy without calls or with settings that have no effect,
        an agent with two policies, and policies of which none is trained."""
        if self.by_name:
            from lightning_policies.calls import check_policies  # not at every start: it imports what training does

            check_policies(self.by_name)


class TurnsConfig(PluginSettings):
    """Policies that are trained in turn."""

    place: ClassVar[str] = "trainer"
    policy_turns: str = ""
    """Policies that are trained in turn, each for a number of steps, again and again: `writer:5,editor:5` trains `writer` in
    steps 1 to 5, `editor` in steps 6 to 10, `writer` in steps 11 to 15, and so on. Empty trains all policies in each step."""

    @property
    def turns(self) -> list[tuple[str, int]]:
        """The policies with their steps, in order. Raises `ConfigError` for a text of another form."""
        found = []
        for part in filter(None, (part.strip() for part in self.policy_turns.split(","))):
            name, _, steps = (word.strip() for word in part.partition(":"))
            if not name or not steps.isdecimal() or not int(steps):
                raise ConfigError(
                    f"trainer.policy_turns = {self.policy_turns!r} has {part!r}: write each policy with the number of its "
                    "steps, such as writer:5,editor:5"
                )
            found.append((name, int(steps)))
        return found

    def check(self) -> None:
        """Raise `ConfigError` for a text of another form."""
        _ = self.turns
