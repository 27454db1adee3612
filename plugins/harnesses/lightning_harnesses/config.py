"""The settings `[untrained.NAME]`: rules that say which calls are recorded and not trained.

The invariant: they are read without what training imports, since every command reads the settings. Each reason belongs to one
rule, so that metrics and `--dev` can tell rules apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lightning.config import NamedSettings, Section
from lightning.config.other_words import did_you_mean
from lightning.errors import ConfigError, DataError
from lightning.types import read_reason
from pydantic import Field

from lightning_harnesses.known import KNOWN

JUDGED = "harnesses"
"""The extra of calls that are judged when their attempt ends: the reason of their rule."""
ACCEPTED, REJECTED = ", accepted", ", rejected"
"""What is added to the reason of a call when it is known what became of the answer."""
PREFIXES = ("!", "model:", "policy:")
"""How globs of `train_agents` begin that are not globs on agents; only the first one has a meaning in a rule's `agents`."""


class RuleConfig(Section):
    """A rule. A call matches if all conditions hold that are given. To the requests of a known rule, `prompt` adds one."""

    agents: tuple[str, ...] = ()
    """Globs on the caller path or the agent's name. A glob after `!` takes out what it matches."""
    models: tuple[str, ...] = ()
    """Globs on the model that a call asks for."""
    prompt: str = ""
    """A text that is in the system prompt, or with which the last message of the user begins."""
    reason: str = ""
    """The reason that is recorded with the calls, which also names the metric; empty is the rule's name."""
    train: bool = False
    """Train the calls all the same: the rule is an exception to the rules after it, or switches off that of a known program."""
    train_accepted: bool | None = None
    """Whether to train a call that the agent accepted: a later call has the answer in its prompt. Then only calls that it
    rejected are left out. Null is true for `compaction`; other rules do not ask what became of the answer."""


class RulesConfig(NamedSettings):
    """Calls that are recorded and not trained, by rules, of which the first that matches a call counts. The rules `title`,
    `topic`, `summary`, `recap`, `quota`, `warmup` and `compaction` are there without settings and match the side calls and
    compactions of known programs, also those of Claude Code, opencode and Codex. In a table with such a name, `prompt` adds a
    request, and `agents` and `models` narrow the rule."""

    place: ClassVar[str] = "untrained"
    of_run: ClassVar[tuple[str, ...]] = tuple(RuleConfig.model_fields)
    __pydantic_extra__: dict[str, RuleConfig] = Field(init=False)

    def check(self) -> None:
        """Raise `ConfigError` for a rule that matches nothing or everything, for settings without effect, for a reason that no
        call can have, and for one that two rules have."""
        reasons: dict[str, str] = {}
        for name, rule in self.by_name.items():
            if why := _why_not(name, rule):
                raise ConfigError(why)
            if (other := reasons.setdefault(reason_of(name, rule), name)) != name:
                raise ConfigError(
                    f"untrained.{other} and untrained.{name} have the same reason {reason_of(name, rule)!r}, so that metrics "
                    f"cannot tell them apart: set untrained.{name}.reason to another one"
                )
        for name in KNOWN.keys() - self.by_name.keys():
            if (other := reasons.get(name, name)) != name:
                raise ConfigError(
                    f"untrained.{other}.reason is {name!r}, which is the reason of a known rule: change it"
                )


def reason_of(name: str, rule: RuleConfig) -> str:
    """Return the reason that is recorded with the calls of a rule."""
    return rule.reason.strip() or name


def all_rules(given: Mapping[str, RuleConfig]) -> dict[str, RuleConfig]:
    """Return the rules in the order in which they are asked: those of the settings, then the other known ones."""
    return {**given, **{name: RuleConfig() for name in KNOWN if name not in given}}


def _why_not(name: str, rule: RuleConfig) -> str:
    """Return why a rule cannot be as its settings say; empty if it can."""
    place = f"untrained.{name}"
    if not (rule.agents or rule.models or rule.prompt) and name not in KNOWN:
        hint = did_you_mean(name, KNOWN)
        return (
            f"[{place}] matches no call{hint or '.'} Set {place}.agents, {place}.models or {place}.prompt. Rules of known "
            f"programs, which need none of these, are {', '.join(KNOWN)}"
        )
    for glob in rule.agents:
        if not glob.removeprefix("!") or glob.removeprefix("!").startswith(PREFIXES):
            return f"{place}.agents has {glob!r}: only globs on agents belong there, globs on models in {place}.models"
    for glob in rule.models:
        if not glob or glob.startswith(("!", "model:")):
            return f"{place}.models has {glob!r}: give a glob on the requested model, such as 'gpt-*'"
    if rule.prompt and not rule.prompt.strip():
        return f"{place}.prompt is blank, which any prompt may contain: give a text that only these calls have"
    if rule.train and rule.train_accepted is not None:
        return f"{place}.train_accepted has no effect with {place}.train = true: leave one of the two out"
    try:
        read_reason(reason_of(name, rule), f"{place}.reason")
        read_reason(reason_of(name, rule) + REJECTED, f"{place}.reason, with {REJECTED!r} for rejected calls,")
    except DataError as error:
        return str(error)
    return ""
