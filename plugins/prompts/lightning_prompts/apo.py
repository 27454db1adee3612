"""APO: automatic prompt optimisation by textual gradients, beam search and a bandit.

The invariant: a prompt goes live only when it earned more on the held-out tasks than the one it came from; a candidate that
the agent's code could not fill in is never run; whatever the optimiser model answers, the search goes on without it.

ProTeGi, arXiv 2305.03495; and what Agent Lightning's own APO does (arXiv 2508.03680). In each round every prompt of the beam is
run on a few training tasks; a model criticises it by what happened and edits it, several times; a bandit finds the best of old
and new with few rollouts; the new beam is run on the held-out tasks. Left out of ProTeGi: paraphrases of each edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, get_args

from lightning.errors import ConfigError

from lightning_prompts.algorithm import PromptAlgorithm
from lightning_prompts.protocol import Bench, OptimizerModel
from lightning_prompts.search import Search
from lightning_prompts.selection import Method

if TYPE_CHECKING:
    from lightning_resources.nouns import Resource


@dataclass(frozen=True, slots=True)
class APO(PromptAlgorithm):
    """Tunes the prompt template of one component of an agent; the weights stay as they are.

    `component` is the name of a `lightning.component(name, prompt=...)`; empty means the only one. The search begins with
    `prompt`, or else with what the agent has now, and keeps the best `beam_width` prompts over `rounds` rounds. In each it
    runs them on `minibatch` tasks and edits each `branch_factor` times, by what `shown` of these rollouts say. The best are
    selected by `selection`, "ucb" or "successive_rejects", with at most `selection_rollouts` rollouts a round; `exploration`
    weighs UCB's bonus. `max_rollouts` bounds the whole run, held-out evaluations included. The best prompt becomes `alias`.

    `optimizer` is the model that criticises and edits, at any OpenAI-compatible endpoint: `{"model": ..., "base_url": ...}`
    or an `OptimizerModel`; its key is in the environment (`api_key_env`, OPENAI_API_KEY). Without one it is the model of the
    setting `optimizer_model`, and without that the policy writes.

    Candidates are dropped, and counted by reason, when the optimiser model did not answer (`no_answer`), gave no template
    (`no_prompt`), or one that cannot stand in for the old one (`empty`, `unchanged`, `too_long` beyond `longest_prompt`
    characters, `lost_placeholder`, `invented_placeholder`, `not_a_template`), or one that was tried before (`duplicate`).
    """

    component: str = ""
    _: KW_ONLY
    prompt: str | None = None
    optimizer: OptimizerModel | Mapping[str, str | float | int | None] | None = None
    beam_width: int = 4
    branch_factor: int = 4
    rounds: int = 3
    minibatch: int = 4
    shown: int = 4
    selection: Method = "ucb"
    selection_rollouts: int = 32
    exploration: float = 0.3
    max_rollouts: int | None = None
    longest_prompt: int = 20_000
    alias: str = "production"

    def __post_init__(self) -> None:
        for name in ("beam_width", "branch_factor", "rounds", "minibatch", "shown", "selection_rollouts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"APO({name}={getattr(self, name)}): it must be at least 1")
        if "/" in self.component or self.component != self.component.strip():
            raise ConfigError(
                f"APO(component={self.component!r}): give the name of one component, without / and spaces around"
            )
        if self.selection not in get_args(Method):
            raise ConfigError(f"APO(selection={self.selection!r}): use {' or '.join(get_args(Method))}")
        if self.exploration < 0:
            raise ConfigError(f"APO(exploration={self.exploration}): it must not be negative")
        if isinstance(self.optimizer, Mapping):
            object.__setattr__(self, "optimizer", _model(self.optimizer))

    @property
    def name(self) -> str:
        """The plugin name that makes this algorithm again from its fields."""
        return "apo"

    @property
    def optimizer_model(self) -> OptimizerModel | None:
        """The model that writes; None means that of the settings, or else the policy."""
        return self.optimizer if isinstance(self.optimizer, OptimizerModel) else None

    async def tune(self, bench: Bench) -> Resource:
        """The best prompt that was found, which may be the one it started from.

        Raises `RunnerError` when no rollout of the starting prompt is scored, `OptimizerError` when the optimiser model
        answered nothing in a whole round.
        """
        return await Search(self, bench).execute()


def _model(given: Mapping[str, str | float | int | None]) -> OptimizerModel:
    try:
        return OptimizerModel(**given)  # type: ignore[arg-type]  # a wrong name is told below, a wrong type by what uses it
    except TypeError as error:
        known = ", ".join(field.name for field in fields(OptimizerModel))
        raise ConfigError(
            f"APO(optimizer=...) has {', '.join(map(str, given)) or 'nothing'}: give model and base_url, and of {known} what "
            "you like; a key stays in the environment"
        ) from error
