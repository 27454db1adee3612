"""Spans among all that a store is asked, in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from lightning.store import Store
from lightning.types import Span
from lightning_otel.traces.store import append_spans, spans

from tests.core.store.test_machine import BACK, StoreMachine, run_machine


class SpansMachine(StoreMachine):
    """A store whose plugin keeps spans, too."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: dict[tuple[str, int, str], Span] = {}

    @precondition(lambda self: self.models)
    @rule(data=st.data(), back=BACK, told=st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 1)), max_size=3))
    def append_spans(self, data: st.DataObject, back: int, told: list[tuple[str, int]]) -> None:
        model = self.pick(data)
        attempt = model.attempt - back
        given = [Span(model.id, attempt, "t", name, name=f"{name}{number}") for name, number in told]
        taken = given if attempt == model.attempt > 0 else []
        assert self.runner.run(append_spans(self.store, given)) == len(taken)
        for span in taken:
            self.spans.setdefault((model.id, attempt, span.span_id), span)

    @precondition(lambda self: self.models)
    @invariant()
    def every_span_is_there(self) -> None:
        for model in self.models.values():
            for attempt in range(model.attempt + 1):
                expected = [self.spans[key] for key in sorted(self.spans) if key[:2] == (model.id, attempt)]
                assert self.runner.run(spans(self.store, model.id, attempt)) == expected


@pytest.mark.slow
def test_any_order_of_operations_and_spans(make_store: Callable[[], Store], request: pytest.FixtureRequest) -> None:
    run_machine(SpansMachine, make_store, request.node.name)
