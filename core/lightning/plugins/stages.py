"""Stages of plugins, which stand in a line of the core's: the contract of a line, and the order of its stages.

The invariant: the order of two stages that stand at the same point is given by one of them, or by a setting; it never depends
on what was installed first. A stage that cannot stand where it means to is refused at the start, with its plugin's name. The
error of a stage that fails names its plugin and the cure.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, ClassVar, Generic, TypeVar, cast

from lightning.errors import LightningError
from lightning.plugins.discovery import DISABLE
from lightning.plugins.manager import plugins

log = logging.getLogger(__name__)


class Stage:
    """A plugin's part in a line. `api` is the version of the line's contract that it was written for. `before` and `after` name
    the stages that it stands before and after, installed or not."""

    api: ClassVar[int] = 0
    before: ClassVar[Collection[str]] = ()
    after: ClassVar[Collection[str]] = ()


class StageError(LightningError):
    """A stage failed; the message names its plugin."""


Kind = TypeVar("Kind", bound=Stage)


@dataclass(frozen=True)  # no slots: `NamedStage[CallStage](...)` would not work with them
class NamedStage(Generic[Kind]):
    """A stage, the name under which `plugin` registered it, and the `version` of the plugin's distribution."""

    name: str
    stage: Kind
    version: str = ""
    plugin: str = ""

    @property
    def said(self) -> str:
        """The names of the stage and its plugin, for messages."""
        return f"{self.name!r} of the plugin {self.plugin or self.name!r}"

    @property
    def off(self) -> str:
        """The environment variable with which a process starts without the stage's plugin."""
        return f"LIGHTNING_DISABLE_PLUGINS={self.plugin or self.name}"

    def failure(self, point: str, error: BaseException, on: str = "", cure: str = "", secret: str = "") -> str:
        """Return the message for a failure of the stage at a point. `on` is what it failed on, `cure` what helps; `secret` is
        masked."""
        told = f"{type(error).__name__}: {error}"
        told = told.replace(secret, "<api key>") if secret else told
        cure = cure or "Mend the plugin, or start without it"
        return f"the stage {self.said} failed{on and f' on {on}'} ({point}: {told}). {cure}: {self.off}"

    def stands_at(self, point: str) -> bool:
        """Whether the stage overrides this method of its line's kind of stages."""
        kind = type(self.stage)
        line = next(each for each in kind.__mro__ if Stage in each.__bases__)
        return getattr(kind, point) is not getattr(line, point)


@dataclass(frozen=True, slots=True)
class Contract:
    """What a line asks of its stages. `kind` is their base class, `asked` the kind of names under which plugins register
    them, and `api` the version of the contract. `points` are its methods; the order matters at those that are `ordered`, and
    one stage at most may stand at those in `alone`, which also says what it does there. `setting` is the setting that gives
    an order. `names` are the attributes of stages that are tuples of names, besides `before` and `after`, each with what it
    names and the names that there are. The line raises `error` for a stage that cannot stand in it, and `failed` of the
    message where a stage fails; errors of `passes` are raised as they are. For messages, `of` is what passes the line,
    `where` is what has the line, `called` what its stages are called (`stages of` ... if empty), and `cure` what helps after
    a failure."""

    kind: type[Stage]
    asked: str
    api: int
    points: tuple[str, ...]
    ordered: tuple[str, ...]
    setting: str
    error: type[LightningError]
    of: str
    where: str
    called: str = ""
    failed: Callable[[str], LightningError] = StageError
    passes: tuple[type[Exception], ...] = (LightningError,)
    cure: str = ""
    alone: tuple[tuple[str, str], ...] = ()
    names: Mapping[str, tuple[str, Collection[str]]] = field(default_factory=dict)

    def made(self, given: object) -> list[NamedStage[Any]]:
        """Make one stage of each name that plugins register for this line: its factory gets `given`. Raises the line's error
        for a stage that cannot be made."""
        made = [self.make(name, given) for name in plugins().names(self.asked)]
        named = [each for each in made if each is not None]
        _warn_of_order(named, plugins().names(self.asked))
        return named

    def make(self, name: str, *given: object) -> NamedStage[Any] | None:
        """Make the stage that a plugin registers under a name: its factory gets `given`. Return None where it makes none.

        Raises the line's error for a stage that cannot be made, or cannot stand here.
        """
        owner, factory = plugins().owner(self.asked, name), cast("Any", plugins().get(self.asked, name))
        try:
            stage = factory(*given)
        except LightningError:
            raise
        except Exception as error:
            raise self.error(
                f"the stage {name!r} of the plugin {owner} cannot be made ({type(error).__name__}: {error}). Mend the "
                f"plugin, or start without it: {DISABLE}={owner.name}"
            ) from error
        if stage is None:
            return None
        each = NamedStage(name, stage, owner.version, owner.name)
        self.check(each)
        return each

    @contextmanager
    def blaming(self, each: NamedStage[Any], point: str, on: str = "") -> Iterator[None]:
        """Turn an exception of the block into the failure of a stage, with the stage's name and the cure; `on` says what it
        failed on. Errors that say their own cause (`passes`) are raised as they are."""
        try:
            yield
        except self.passes:
            raise
        except Exception as error:
            log.exception("the stage %s failed (%s)", each.said, point)
            raise self.failed(each.failure(point, error, on, self.cure)) from error

    def not_carried_out(self, said: str, wanted: str, known: Collection[str], cure: str) -> str:
        """Return the message that no plugin carries out what was `said`, among the `known` stages, and what helps: the extra
        that brings what is `wanted`, or the `cure`."""
        called = self.called or f"stages of {self.of}"
        return (
            f"{said}, and no plugin is there that carries it out: the {called} here are {', '.join(known) or 'none'}."
            f"{plugins().cures(self.asked, wanted)} Bring the plugin back, or {cure} to go on without it"
        )

    def check(self, each: NamedStage[Kind]) -> None:
        """Raise the line's error for a stage that cannot stand where it means to."""
        stage, kind, home = each.stage, type(each.stage), f"{self.kind.__module__}"
        if not isinstance(stage, self.kind):
            raise self.error(
                f"the stage {each.said} is a {kind.__name__}: derive it from `{home}.{self.kind.__name__}`"
            )
        if stage.api != self.api:
            wanted = (
                f"for API {stage.api}" if stage.api else "without saying for which API (its author writes `api = 1`)"
            )
            raise self.error(
                f"the stage {each.said} was written {wanted}; this {self.where} has API {self.api} (`{home}.API`). Install "
                f"a release of the plugin for it, or set {each.off}"
            )
        lines = [one.__name__ for one in kind.__mro__ if Stage in one.__bases__]
        if len(lines) > 1:
            raise self.error(
                f"the stage {each.said} derives from {' and '.join(lines)}, which stand in two lines: make one for each"
            )
        for attribute in ("before", "after", *self.names):
            if isinstance(getattr(stage, attribute), str):
                raise self.error(
                    f"`{attribute}` of the stage {each.said} is a text: make it a tuple of names, as in ('texts',)"
                )
        for attribute, (named, known) in self.names.items():
            if unknown := ", ".join(name for name in getattr(stage, attribute) if name not in known):
                raise self.error(
                    f"`{attribute}` of the stage {each.said} names {named} that there are none of: {unknown}. There are "
                    f"{', '.join(known)}"
                )
        for point in self.points:
            awaited = inspect.iscoroutinefunction(getattr(self.kind, point))
            if awaited != inspect.iscoroutinefunction(getattr(stage, point)):
                cure = "is awaited: begin it with `async def`" if awaited else "is not awaited: begin it with `def`"
                raise self.error(f"{point!r} of the stage {each.said} {cure}")
        for name in (name for name in vars(kind) if not name.startswith("_") and not hasattr(self.kind, name)):
            if meant := difflib.get_close_matches(name, self.points, 1, 0.8):
                raise self.error(
                    f"the stage {each.said} has {name!r}, which is never asked: did you mean {meant[0]!r}?"
                )

    def in_order(self, stages: Sequence[NamedStage[Kind]], order: Sequence[str]) -> list[NamedStage[Kind]]:
        """Return the stages in the order that `before`, `after` and `order` give. Raises the line's error, with names, for a
        stage that cannot stand where it means to, for two at one point without an order, and for stages that would stand before
        themselves."""
        for each in stages:
            self.check(each)
        if unknown := sorted(set(order) - {each.name for each in stages}):
            log.warning("%s names stages that no plugin has here: %s", self.setting, ", ".join(unknown))
        later: dict[str, set[str]] = {}
        for each in stages:
            for name in each.stage.before:
                later.setdefault(each.name, set()).add(name)
            for name in each.stage.after:
                later.setdefault(name, set()).add(each.name)
        for first, second in pairwise(order):
            later.setdefault(first, set()).add(second)
        behind = {name: frozenset(_reached(name, later)) for name in {*later, *(each.name for each in stages)}}
        for name, found in behind.items():
            if name in found:
                circle = " and ".join(repr(other) for other in sorted({name, *found}) if name in behind.get(other, ()))
                raise self.error(
                    f"the order of the stages of {self.of} goes round: {circle} each stand before the other"
                )
        for one, other in combinations(stages, 2):
            shared = [point for point in self.ordered if one.stands_at(point) and other.stands_at(point)]
            if shared and other.name not in behind[one.name] and one.name not in behind[other.name]:
                raise self.error(
                    f"the stages {one.name!r} and {other.name!r} both stand at {shared[0]!r}, and neither says which "
                    f'comes first: set {self.setting} = ["{one.name}", "{other.name}"], or the other way round'
                )
        return sorted(sorted(stages, key=lambda each: each.name), key=lambda each: -len(behind[each.name]))


class StageLine(Generic[Kind]):
    """The stages of a line, in order. Raises the error of its `contract` for two stages without an order, for a stage that was
    written for another contract, and for two that stand where only one may."""

    contract: ClassVar[Contract]

    def __init__(self, stages: Sequence[NamedStage[Kind]] = (), order: Sequence[str] = ()) -> None:
        self.stages = self.contract.in_order(stages, order)
        for point, done in self.contract.alone:
            if len(standing := self.at(point)) > 1:
                both = " and ".join(each.said for each in standing)
                offs = ", or ".join(each.off for each in standing)
                raise self.contract.error(f"the stages {both} both {done}: set {offs}")

    @property
    def versions(self) -> Mapping[str, str]:
        """The names of the stages, in their order, with the versions of their distributions. Each step records them."""
        return {each.name: each.version for each in self.stages}

    def at(self, point: str) -> list[NamedStage[Kind]]:
        """The stages that stand at a point, in their order."""
        return [each for each in self.stages if each.stands_at(point)]


def _warn_of_order(stages: Sequence[NamedStage[Kind]], known: Collection[str]) -> None:
    """Warn of a name in `before` or `after` that no stage has, if one of the `known` is similar. Any other unknown name may be
    that of a stage that is not installed."""
    for each in stages:
        for attribute in ("before", "after"):
            for name in set(getattr(each.stage, attribute)) - {*known}:
                if meant := difflib.get_close_matches(name, {*known} - {each.name}, 1, 0.8):
                    log.warning(
                        "`%s` of the stage %s names %r, and no plugin has a stage of that name: did you mean %r?",
                        attribute,
                        each.said,
                        name,
                        meant[0],
                    )


def _reached(name: str, later: Mapping[str, Collection[str]]) -> Iterator[str]:
    seen: set[str] = set()
    waiting = list(later.get(name, ()))
    while waiting:
        found = waiting.pop()
        if found not in seen:
            seen.add(found)
            yield found
            waiting.extend(later.get(found, ()))
