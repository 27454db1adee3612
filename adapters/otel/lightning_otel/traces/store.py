"""The store operations on spans, such as `await append_spans(store, spans)`. The plugin adds them to every store.

The invariant: a span belongs to the attempt that was current when it arrived; its first content stays; no attempt has more than
`MAX_SPANS`. A project sees and adds spans of its own rollouts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from lightning.installation import OWN
from lightning.store.operation import LOOK, RUN, Operation, OperationGroup, operation
from lightning.store.protocol import Store
from lightning.types import Span

MAX_SPANS: Final = 10_000
"""The most spans of one attempt, so that a program that never stops sending cannot fill the database."""


class SpanOperations(Protocol):
    """The signatures of the operations on spans."""

    async def append_spans(self, spans: Sequence[Span]) -> int:
        """Store spans durably. Return how many of them are stored now, including those stored before.

        The first content of a span id stays. Exporters send late, so spans of the current attempt are accepted after its end,
        too. Spans of unknown rollouts, of other attempts, and beyond `MAX_SPANS` of an attempt are not stored. Repeating the
        call gives the same answer.
        """

    async def spans(self, rollout: str, attempt: int | None = None) -> list[Span]:
        """Return the spans of an attempt (default: the rollout's current one) in the order they began."""


async def _of_project(store: Store, project: str, asked: Operation, arguments: dict[str, Any]) -> Any:
    """Store spans for one project: those of other projects are dropped, like those of unknown rollouts."""
    told: Sequence[Span] = arguments["spans"]
    seen = {name: await _sees(store, project, name) for name in dict.fromkeys(span.rollout for span in told)}
    return await asked(store, [span for span in told if seen[span.rollout]])


async def _sees(store: Store, project: str, name: str) -> bool:
    rollout = await store.get_rollout(name)
    run = await store.get_run(rollout.run) if rollout is not None else None
    return run is not None and run.project == project


append_spans = operation(
    SpanOperations.append_spans,
    "POST /spans",
    RUN,
    answer="stored",
    doc="Store spans durably. Those of unknown rollouts and of other than current attempts are not taken. The answer "
    "counts those that are stored now, those that were before included.",
    owned=_of_project,
)
spans = operation(
    SpanOperations.spans,
    "GET /rollouts/{rollout}/spans",
    LOOK,
    cursor=("span_id",),
    doc="The spans of an attempt in the order they began.",
)
SPANS: Final = OperationGroup(
    "spans",
    (append_spans, spans),
    parts={"sql": "lightning_otel.traces.store_sql:PART", "redis": "lightning_otel.traces.store_redis:FUNCTIONS"},
    distribution=OWN,
)
