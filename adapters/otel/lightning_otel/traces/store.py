"""The operations on spans, which the plugin brings to every store: `await append_spans(store, spans)`.

The invariant: a span belongs to the attempt that was current when it arrived, its first content stays, and no attempt has more
than `MAX_SPANS` of them. A project sees and adds those of its own rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from lightning.installation import OWN
from lightning.store.operation import LOOK, RUN, Operation, OperationGroup, operation
from lightning.store.protocol import Store
from lightning.types import Span

MAX_SPANS: Final = 10_000
"""Spans that one attempt may have: a program that never stops telling must not fill the database."""


class SpanOperations(Protocol):
    """What may be asked of spans."""

    async def append_spans(self, spans: Sequence[Span]) -> int:
        """Store spans durably; return how many of them are stored now, those that were before included.

        The first content of a span id stays. Exporters send late, so spans of the current attempt are taken after its end
        too; those of unknown rollouts and of other attempts are not, nor are those that an attempt has beyond `MAX_SPANS`.
        Repeating gives the same answer.
        """

    async def spans(self, rollout: str, attempt: int | None = None) -> list[Span]:
        """The spans of an attempt (default: the rollout's current one) in the order they began."""


async def _of_project(store: Store, project: str, asked: Operation, arguments: dict[str, Any]) -> Any:
    """See `Rule`: spans of other projects are not taken, as those of unknown rollouts are not."""
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
