"""Which calls share a row, and that a row says about each call exactly what was recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch import Sample, build_samples, sampler_logprobs
from lightning.batch.trajectory import Trajectory
from lightning.testing.trajectories import make_call, make_trajectory
from lightning.types import CallStatus, VersionRun

SYSTEM_A, SYSTEM_B = (1, 2, 3), (4, 5, 6)


def rows_of(trajectory: Trajectory, **options: object) -> tuple[Sample, ...]:
    return build_samples([trajectory], [[1.0] * len(trajectory.transitions)], **options)  # type: ignore[arg-type]


def spans(sample: Sample) -> list[tuple[int, int, int]]:
    return [(span.seq, span.start, span.stop) for span in sample.spans]


def test_turns_that_extend_one_another_are_one_row() -> None:
    (row,) = rows_of(make_trajectory([(SYSTEM_A, (7, 8)), ((*SYSTEM_A, 7, 8, 9), (10,))]))
    assert row.ids.tolist() == [1, 2, 3, 7, 8, 9, 10]
    assert spans(row) == [(0, 3, 5), (1, 6, 7)]
    assert (row.weights != 0).tolist() == [False, False, False, True, True, False, True]


def test_interleaved_agents_are_one_row_each() -> None:
    a1, b1 = (SYSTEM_A, (7,)), (SYSTEM_B, (8,))
    a2, b2 = ((*SYSTEM_A, 7, 9), (10,)), ((*SYSTEM_B, 8, 9), (11,))
    rows = rows_of(make_trajectory([a1, b1, a2, b2]))
    assert [spans(row) for row in rows] == [[(0, 3, 4), (2, 5, 6)], [(1, 3, 4), (3, 5, 6)]]


def test_a_changed_system_prompt_begins_a_new_row() -> None:
    rows = rows_of(make_trajectory([(SYSTEM_A, (7,)), ((9, 2, 3, 7, 8), (10,)), ((9, 2, 3, 7, 8, 10, 11), (12,))]))
    assert [spans(row) for row in rows] == [[(0, 3, 4)], [(1, 5, 6), (2, 7, 8)]]


def test_parallel_calls_with_one_prompt_stay_three_rows() -> None:
    rows = rows_of(make_trajectory([(SYSTEM_A, (7,)), (SYSTEM_A, (8,)), (SYSTEM_A, (7,))]))
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 3, 7]]


def test_the_longest_earlier_row_is_extended() -> None:
    rows = rows_of(make_trajectory([((1,), (2,)), ((1, 2, 3, 9), (4,)), ((1, 2, 3), (9,)), ((1, 2, 3, 9, 4, 5), (6,))]))
    assert [spans(row) for row in rows] == [[(0, 1, 2), (2, 3, 4), (1, 4, 5), (3, 6, 7)]]


def test_a_call_already_in_a_row_as_context_shares_it() -> None:
    (row,) = rows_of(make_trajectory([((1, 2, 3, 4), (5,)), ((1, 2), (3,))]))
    assert spans(row) == [(1, 2, 3), (0, 4, 5)]
    assert (row.weights != 0).tolist() == [False, False, True, False, True]


def test_rows_have_one_temperature() -> None:
    first = make_call(SYSTEM_A, (7,), seq=0, temperature=1.0)
    second = make_call((*SYSTEM_A, 7, 8), (9,), seq=1, temperature=0.5)
    trajectory = replace(make_trajectory([(SYSTEM_A, (7,))] * 2), transitions=(first, second))
    assert [row.temperature for row in rows_of(trajectory)] == [1.0, 0.5]


def test_greedy_calls_count_as_temperature_one() -> None:
    call = make_call(SYSTEM_A, (7,), temperature=0.0)
    assert rows_of(replace(make_trajectory(), transitions=(call,)))[0].temperature == 1.0


@pytest.mark.parametrize("status", [CallStatus.ABORTED, CallStatus.ERROR])
def test_calls_that_did_not_end_well_never_appear(status: CallStatus) -> None:
    trajectory = make_trajectory([(SYSTEM_A, (7,)), (SYSTEM_B, (8,))])
    broken = replace(
        trajectory, transitions=(trajectory.transitions[0], replace(trajectory.transitions[1], status=status))
    )
    rows = rows_of(broken)
    assert [spans(row) for row in rows] == [[(0, 3, 4)]]
    assert rows[0].weights.sum() == 1.0


def test_untrained_calls_are_context_without_weight() -> None:
    trajectory = make_trajectory(
        [(SYSTEM_A, (7,)), ((*SYSTEM_A, 7, 8), (9,)), ((*SYSTEM_A, 7, 8, 9, 10), (11,))], trainable=(True, False, True)
    )
    (row,) = rows_of(trajectory)
    assert spans(row) == [(0, 3, 4), (2, 7, 8)]
    assert row.weights[5] == 0.0
    assert rows_of(replace(trajectory, trainable=(False,) * 3)) == ()


def test_zero_advantages_are_dropped_only_when_asked_and_still_count() -> None:
    trajectory = make_trajectory([(SYSTEM_A, (7,)), (SYSTEM_B, (8,))])
    kept = build_samples([trajectory], [[1.0, 0.0]])
    dropped = build_samples([trajectory], [[1.0, 0.0]], drop_zero_advantages=True)
    assert (len(kept), len(dropped)) == (2, 1)
    assert dropped[0].weights[3] == kept[0].weights[3] == 0.5


def test_one_call_without_logprobs_is_nan_there_only() -> None:
    calls = (
        make_call(SYSTEM_A, (7, 8), seq=0, logprob=None),
        make_call((*SYSTEM_A, 7, 8, 9), (10,), seq=1, logprob=-2.0),
    )
    (row,) = rows_of(replace(make_trajectory([(SYSTEM_A, (7,))] * 2), transitions=calls))
    np.testing.assert_array_equal(row.logprobs[3:], np.array([np.nan, np.nan, np.nan, -2.0], np.float32))


def test_constrained_calls_have_no_comparable_logprobs() -> None:
    call = replace(make_call(SYSTEM_A, (7,)), constrained=True)
    assert np.isnan(rows_of(replace(make_trajectory(), transitions=(call,)))[0].logprobs[3])


def test_versions_change_where_an_update_fell_inside_a_call() -> None:
    call = replace(make_call(SYSTEM_A, (7, 8, 9)), versions=(VersionRun(0, 4), VersionRun(2, 5)))
    assert rows_of(replace(make_trajectory(), transitions=(call,)))[0].versions.tolist() == [-1, -1, -1, 4, 4, 5]


def test_rollouts_share_no_row() -> None:
    one, two = make_trajectory(rollout="a"), make_trajectory(rollout="b")
    assert len(build_samples([one, two], [[1.0], [1.0]])) == 2


@st.composite
def conversations(draw: st.DrawFn) -> Trajectory:
    """Calls that extend, repeat, cut or ignore earlier ones, over three token ids so that prefixes also meet by chance."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    calls: list[tuple[list[int], list[int]]] = [(draw(tokens), draw(tokens))]
    for _ in range(draw(st.integers(0, 6))):
        prompt, response = draw(st.sampled_from(calls))
        kind = draw(st.sampled_from(["extend", "retry", "cut", "new"]))
        if kind == "extend":
            calls.append((prompt + response + draw(st.lists(st.integers(0, 2), max_size=3)), draw(tokens)))
        elif kind == "retry":
            calls.append((prompt, draw(tokens)))
        elif kind == "cut":
            whole = prompt + response
            at = draw(st.integers(1, len(whole) - 1))
            calls.append((whole[:at], whole[at:]))
        else:
            calls.append((draw(tokens), draw(tokens)))
    flags = draw(st.lists(st.booleans(), min_size=len(calls), max_size=len(calls)))
    made = make_trajectory(calls, trainable=flags)
    varied = tuple(
        replace(make_call(call.prompt_ids, call.response_ids, seq=call.seq, logprob=-0.5 - call.seq, version=call.seq))
        for call in made.transitions
    )
    return replace(made, transitions=varied)


@given(conversations())
def test_every_trained_call_is_one_span_in_its_own_context(trajectory: Trajectory) -> None:
    advantages = [float(call.seq + 1) for call in trajectory.transitions]
    rows = build_samples([trajectory], [advantages])
    calls = {call.seq: call for call in trajectory.transitions}
    found: list[int] = []
    for row in rows:
        inside = np.zeros(len(row), dtype=bool)
        for span in row.spans:
            call = calls[span.seq]
            part = slice(span.start, span.stop)
            assert row.ids[: span.start].tolist() == list(call.prompt_ids)
            assert row.ids[part].tolist() == list(call.response_ids)
            np.testing.assert_array_equal(row.logprobs[part], sampler_logprobs(call))
            assert set(row.versions[part].tolist()) == {call.version}
            assert set(row.advantages[part].tolist()) == {float(span.seq + 1)}
            assert not inside[part].any(), "two calls train the same token"
            inside[part] = True
            found.append(span.seq)
        np.testing.assert_array_equal(row.weights != 0, inside)
        assert set(row.versions[~inside].tolist()) <= {-1}
    wanted = [call.seq for call, trained in zip(trajectory.transitions, trajectory.trainable, strict=True) if trained]
    assert sorted(found) == wanted


@given(conversations())
def test_no_row_could_have_been_part_of_another_by_extension(trajectory: Trajectory) -> None:
    rows = build_samples([trajectory], [[1.0] * len(trajectory.transitions)])
    for late in rows:
        first = min(late.spans, key=lambda span: span.seq)
        for early in rows:
            if max(span.seq for span in early.spans) < first.seq:
                prompt = late.ids[: first.start]
                assert len(early) > len(prompt) or not np.array_equal(prompt[: len(early)], early.ids)
