"""Which rule has a call.

The invariant: the first rule that matches counts, in the order of the settings and then of the known rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning.trainer.training_data import OF_MODEL, is_trainable
from lightning.types import Caller

from lightning_harnesses.config import RuleConfig, all_rules, reason_of
from lightning_harnesses.known import KNOWN, TRAINED_IF_ACCEPTED, Pattern
from lightning_harnesses.requests import Asked, read


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as calls are compared with it. `reason` is why its calls are not trained, empty if they are. If it is `judged`,
    the end of the attempt says of each call whether the agent accepted it; with `trains_accepted` only rejected calls are left
    out."""

    name: str
    given: RuleConfig
    reason: str
    judged: bool
    trains_accepted: bool
    patterns: tuple[Pattern, ...]

    def why(self, caller: Caller, model: str, asked: Asked) -> str:
        """Return what shows that the rule has a call: a known program's name, or the rule's settings; empty if nothing does."""
        rule = self.given
        if rule.agents and not is_trainable(caller, rule.agents):
            return ""
        if rule.models and not is_trainable(caller, [f"{OF_MODEL}{glob}" for glob in rule.models], model):
            return ""
        if of_program := next((each.program for each in self.patterns if each.matches(asked)), ""):
            return of_program
        prompted = rule.prompt and (rule.prompt in asked.system or asked.last.startswith(rule.prompt))
        return f"untrained.{self.name}" if prompted or not (self.patterns or rule.prompt) else ""


def rules_of(given: Mapping[str, RuleConfig]) -> tuple[Rule, ...]:
    """Return the rules of these settings and the known ones."""
    return tuple(
        Rule(
            name,
            rule,
            "" if rule.train else reason_of(name, rule),
            name in TRAINED_IF_ACCEPTED or rule.train_accepted is not None,
            name in TRAINED_IF_ACCEPTED if rule.train_accepted is None else rule.train_accepted,
            KNOWN.get(name, ()),
        )
        for name, rule in all_rules(given).items()
    )


def find_rule(
    rules: tuple[Rule, ...], caller: Caller, model: str, body: Mapping[str, object]
) -> tuple[Rule, str] | None:
    """Return the rule that has a call, and what shows it; None if no rule has it."""
    asked = read(body)
    return next(((rule, why) for rule in rules if (why := rule.why(caller, model, asked))), None)
