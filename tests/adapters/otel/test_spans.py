"""What every store promises about spans, which arrive late, twice and out of order."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from lightning.errors import DataError, StoreError
from lightning.store import Store, rows
from lightning.store.sqlite import SqliteStore
from lightning.types import Fault, Outcome, Rollout, Span
from lightning_otel.traces import store_redis, store_sql
from lightning_otel.traces.store import SPANS, append_spans, spans

from tests.core.store.backends import everywhere

RolloutOf = Callable[..., Rollout]


def span(number: int = 1, **changes: object) -> Span:
    made = Span(
        "a", 1, "f" * 32, f"{number:016x}", name=f"span {number}", started_at=float(number), ended_at=number + 0.5
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
async def leased(store: Store, rollout: RolloutOf) -> Store:
    """A store whose rollout `a` runs its attempt 1 of 2."""
    await store.create_rollouts([rollout(), rollout("b")])
    await store.lease("run", "w")
    return store


@everywhere
async def test_a_span_comes_back_exactly(leased: Store) -> None:
    given = span(
        parent_id="e" * 16,
        name="execute_tool π \ud800",
        kind="server",
        status="error",
        error="Timeout",
        service="shop",
        attributes={"a": [1, 2.5, None, True], "b": {"c": "\ud800 \0"}},
        started_at=1.7e9 + 0.25,
    )
    assert await append_spans(leased, [given]) == 1
    (found,) = await spans(leased, "a")
    assert found == replace(given, name="execute_tool π \\ud800")
    assert await spans(leased, "a", 1) == [found]


async def test_the_order_is_that_of_their_beginnings(leased: Store) -> None:
    assert await append_spans(leased, [span(3), span(1)]) == 2
    assert await append_spans(leased, [span(2)]) == 1
    assert await spans(leased, "a") == [span(1), span(2), span(3)]


async def test_a_repeated_span_is_taken_and_its_first_content_stays(leased: Store) -> None:
    assert await append_spans(leased, [span(1), span(1, name="twice in one request")]) == 2
    assert await append_spans(leased, [span(1, name="other"), span(2)]) == 2
    assert await spans(leased, "a") == [span(1), span(2)]
    assert await append_spans(leased, []) == 0


@everywhere
async def test_late_spans_of_the_current_attempt_are_taken_and_those_of_an_earlier_one_are_not(leased: Store) -> None:
    assert await append_spans(leased, [span(1)]) == 1
    await leased.complete("a", 1, Outcome(fault=Fault.INFRASTRUCTURE))
    assert await append_spans(leased, [span(2)]) == 1  # ended, but nothing has taken its place yet
    await leased.lease("run", "w")
    assert await append_spans(leased, [span(3), span(1, attempt=2)]) == 1
    await leased.complete("a", 2, Outcome(reward=1.0))
    assert await append_spans(leased, [span(4), span(4, attempt=2), span(5, attempt=3)]) == 1
    assert await spans(leased, "a", 1) == [span(1), span(2)]
    assert await spans(leased, "a") == [span(1, attempt=2), span(4, attempt=2)]


async def test_spans_of_nobody_do_not_cost_those_of_others(leased: Store) -> None:
    nobody = [span(1, rollout="nobody"), span(1, rollout="b", attempt=0), span(1, rollout="b")]
    assert await append_spans(leased, [*nobody, span(1)]) == 1
    assert await spans(leased, "a") == [span(1)]
    assert await spans(leased, "b") == []
    with pytest.raises(StoreError, match="'nobody' is unknown"):
        await spans(leased, "nobody")


@pytest.mark.parametrize("changes", [{"started_at": math.nan}, {"ended_at": math.inf}, {"attributes": {"a": object()}}])
async def test_what_a_span_cannot_hold_is_named(leased: Store, changes: dict[str, object]) -> None:
    with pytest.raises(DataError, match="of span '0000000000000001' of rollout 'a'"):
        await append_spans(leased, [span(2), span(1, **changes)])
    assert await spans(leased, "a") == []


async def test_an_attempt_has_room_for_so_many(leased: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules.values() if "MAX_SPANS" in getattr(module, "__dict__", ())]:
        monkeypatch.setattr(module, "MAX_SPANS", 3)  # of whichever store it is
    assert await append_spans(leased, [span(number) for number in range(1, 6)]) == 3
    assert await append_spans(leased, [span(number) for number in range(1, 6)]) == 3
    assert await spans(leased, "a") == [span(1), span(2), span(3)]


def test_a_database_has_a_function_with_the_arguments_of_each_operation() -> None:
    for functions in (store_sql.PART.functions, store_redis.FUNCTIONS):
        assert set(functions) == {operation.name for operation in SPANS.operations}
        for operation in SPANS.operations:
            found = list(inspect.signature(functions[operation.name]).parameters)[1:]
            assert found == list(operation.signature.parameters), operation


async def test_the_table_has_a_column_for_each_field_and_the_statement_a_place_for_each_column(
    sqlite: SqliteStore,
) -> None:
    assert await append_spans(sqlite, []) == 0
    found = await sqlite._read(lambda tx: tx.all("PRAGMA table_info(spans)"))
    assert {"rollout", "attempt", *rows.SPANS.columns} <= {row[1] for row in found}
    assert set(rows.SPANS.fields) | {"rollout", "attempt"} == {field.name for field in fields(Span)}
    assert store_sql.INSERT.count("?") == 2 + len(rows.SPANS.columns)
