"""The call stage `harnesses`: marks the calls that a rule leaves out, and, when an attempt ends, those that the agent rejected.

The invariant: the rules are those that are recorded with the run, so that all gateways of the run mark alike. What the agent
itself says of a call counts before any rule. The mark is in the record of the call; nothing afterwards matches requests again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lightning.bounded import Bounded, Once
from lightning.config import recorded_config
from lightning.gateway.stages import CallStage
from lightning.types import Outcome, Rollout, Run, Transition

from lightning_harnesses.config import ACCEPTED, JUDGED, REJECTED, RulesConfig
from lightning_harnesses.rules import Rule, find_rule, rules_of
from lightning_harnesses.verdicts import verdicts

if TYPE_CHECKING:
    from lightning.gateway.call import Call, Request
    from lightning.gateway.calls import Parts

log = logging.getLogger(__name__)

RUNS: Final = 1024
"""The most runs whose rules are remembered."""


class HarnessesStage(CallStage):
    """The stage `harnesses`. It stands in all gateways alike, since a gateway reads the rules in a run's record."""

    api, after, before = 1, ("policies",), ("history",)

    def __init__(self, parts: Parts) -> None:
        self._store = parts.store
        self._rules = Bounded[str, tuple[Rule, ...]](RUNS)
        self._said = Once()

    async def admitted(self, call: Call, request: Request) -> None:
        """Mark a call that a rule has, or note that the end of its attempt will tell."""
        if call.untrained:
            return
        run = call.claims.run or call.claims.session
        rules = await self._of(run)
        model = request.model if isinstance(request.model, str) else ""
        found = find_rule(rules, call.caller, model, request.body)  # in no thread: it looks at few messages
        if found is None or not found[0].reason:
            return
        rule, why = found
        if rule.judged:
            call.extras[JUDGED] = rule.reason.encode()
        if not rule.trains_accepted:
            call.untrained = rule.reason
        if self._said.first((run, rule.name)):
            log.warning(
                "run %s: calls of the kind %r (%s) are recorded and not trained%s; untrained.%s.train=true trains them (said "
                "once for each rule)",
                run,
                rule.reason,
                why,
                " where the agent rejects the answer" if rule.trains_accepted else "",
                rule.name,
            )

    async def ended(self, rollout: Rollout, outcome: Outcome, calls: Sequence[Transition]) -> Outcome:
        """Return the outcome with the calls as untrained whose answers the agent rejected. For calls that are untrained anyway,
        add to the reason what became of the answer."""
        reasons = {call.id: call.extras[JUDGED].decode() for call in calls if JUDGED in call.extras}
        if not reasons:
            return outcome
        told = await asyncio.to_thread(verdicts, calls, reasons)
        left_out = {call.id for call in calls if call.untrained}
        found = {
            name: reasons[name] + (ACCEPTED if accepted else REJECTED)
            for name, accepted in told.items()
            if name in left_out or not accepted
        }
        return replace(outcome, untrained={**found, **outcome.untrained})

    async def _of(self, run: str) -> tuple[Rule, ...]:
        """Return the rules of a run; the known ones for calls of no run. Raises `StoreError`."""
        if (known := self._rules.used(run)) is not None:
            return known
        found = await self._store.get_run(run) if run else None
        return self._rules.keep(run, rules_of(recorded_rules(found).by_name))


def recorded_rules(run: Run | None) -> RulesConfig:
    """Return the rules of a run's record; none for a run without. Raises `ConfigError` for a record that this release does not
    accept."""
    said = None if run is None else run.config.get("config")
    given = said.get(RulesConfig.place) if isinstance(said, Mapping) else None
    return RulesConfig() if not given else RulesConfig.of(recorded_config({RulesConfig.place: given})[0])
