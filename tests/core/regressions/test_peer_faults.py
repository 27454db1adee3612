"""What was found wrong in the nearest program of this kind: each fault, and the tests that keep it out of this one.

A fault that a test elsewhere holds is only named here, so that removing that test is noticed; the others are held below.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch import build_samples
from lightning.errors import StaleAttemptError, StoreError
from lightning.store.memory import MemoryStore
from lightning.store.sqlite import SqliteStore
from lightning.testing.trajectories import make_trajectory
from lightning.trainer.training_data import all_rollouts
from lightning.types import Fault, Outcome, Rollout, Run, Status, Task, Transition, logprobs, token_ids

TESTS = Path(__file__).parents[2]
HERE = "core/regressions/test_peer_faults.py"

FAULTS = {
    "a restart loses all state": (
        f"{HERE}::test_everything_is_there_after_a_restart",
        "core/store/test_processes.py::test_what_was_acknowledged_survives_kill_9",
        "core/trainer/test_loop.py::test_wherever_it_is_cut_a_resume_finishes_exactly_once",
    ),
    "three parallel calls with one prompt become one": (
        "core/batch/test_merge.py::test_parallel_calls_with_one_prompt_stay_three_rows",
        "core/gateway/test_calls.py::test_parallel_calls_with_one_prompt_are_as_many_transitions",
    ),
    "interleaved sub-agents give a row for each call": (
        "core/batch/test_merge.py::test_interleaved_agents_are_one_row_each",
        "core/engines/test_invariance.py::test_interleaved_agents_in_2_rows_or_4",
    ),
    "rewards in bfloat16 make false ties": (
        "core/credit/test_advantage.py::test_rewards_that_bfloat16_would_tie_are_not_tied",
    ),
    "a failed rollout is trained as a reward of 0": (
        f"{HERE}::test_a_failure_has_no_reward",
        "core/algorithms/test_lightning_rl.py::test_failed_rollouts_are_absent_not_zero",
        "core/trainer/test_loop.py::test_failed_rollouts_are_counted_and_the_rest_is_trained",
    ),
    "a reward is taken twice, and after the end": (
        f"{HERE}::test_a_second_reward_is_refused_also_after_the_end",
        "core/store/test_contract.py::test_repeating_an_outcome_changes_nothing_and_contradicting_it_is_refused",
    ),
    "the client is gone, and generation goes on and is recorded as an answer": (
        "core/gateway/test_failures.py::test_a_client_that_leaves_a_stream_aborts_the_call",
        "core/gateway/test_failures.py::test_a_client_that_leaves_while_waiting_aborts_the_call",
        "core/gateway/test_real_vllm.py::test_a_client_that_leaves_ends_vllms_work",
    ),
    "a dead endpoint is neither left nor told of": (
        "core/gateway/test_failures.py::test_a_dead_server_is_left_for_a_living_one",
        "core/gateway/test_failures.py::test_a_sick_server_gets_nothing",
    ),
    "clients die of refusals during a weight update": (
        "core/gateway/test_updates.py::test_a_request_that_arrives_during_an_update_waits",
    ),
    "only the first page of rollouts is seen": (
        f"{HERE}::test_all_rollouts_are_seen_however_many_pages_they_are",
        "core/store/test_contract.py::test_pages_run_through_everything_in_creation_order",
    ),
    "the policy's version is always 0": (
        "core/gateway/test_updates.py::test_a_call_is_split_where_vllm_was_frozen",
        "core/batch/test_merge.py::test_versions_change_where_an_update_fell_inside_a_call",
    ),
    "the agent's temperature is overridden": ("core/gateway/test_calls.py::test_who_decides_on_sampling",),
    "no streaming, Responses, Messages or list of models": (
        "core/gateway/test_streaming.py::test_a_stream_is_recorded_like_a_whole_answer",
        "core/gateway/test_responses.py::test_a_response_is_answered_and_recorded",
        "core/gateway/test_messages.py::test_a_message_is_answered_and_recorded",
        "core/gateway/test_calls.py::test_models_lists_the_policy",
    ),
    "agents get the admin's key": (
        "core/gateway/test_access.py::test_a_token_opens_nothing_else",
        "plugins/server/test_auth.py::test_the_agents_key_of_a_rollout_is_no_token",
    ),
    "the loss is divided by the number of rows": (
        "core/batch/test_weights.py::test_merging_changes_no_weight",
        "core/engines/test_invariance.py::test_every_kind_of_step_has_one_gradient",
    ),
    "rows are dropped at random to fill mini-batches": (
        f"{HERE}::test_every_response_token_is_trained_once_and_no_other_ever",
        "core/engines/test_invariance.py::test_rows_order_and_microbatches_do_not_matter",
    ),
    "one row without logprobs turns the importance correction off for all": (
        "core/losses/test_sequence.py::test_a_call_without_logprobs_has_the_ratio_1_and_the_others_keep_theirs",
        "core/losses/test_policy_gradient.py::test_a_token_without_old_logprob_is_on_policy_with_a_gradient_and_disturbs_no_other",
    ),
    "calls are merged with the one before only": (
        "core/batch/test_merge.py::test_the_longest_earlier_row_is_extended",
        "core/batch/test_merge.py::test_no_row_could_have_been_part_of_another_by_extension",
    ),
    "only the last scalar reward counts": (
        f"{HERE}::test_all_named_rewards_of_an_outcome_are_kept",
        "core/credit/test_assign.py::test_rewards_given_inside_a_rollout_count",
        "core/algorithms/test_lightning_rl.py::test_step_rewards_are_part_of_the_return",
    ),
    "prompts and padding get loss": (
        f"{HERE}::test_every_response_token_is_trained_once_and_no_other_ever",
        "core/engines/test_logprobs.py::test_padded_rows_have_the_models_own_logprobs",
    ),
}


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_"))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_held_by_tests_that_exist(fault: str) -> None:
    for place in FAULTS[fault]:
        file, _, name = place.partition("::")
        assert name in names_in(file), f"{place} is gone: what keeps out that {fault}?"


# held here ------------------------------------------------------------------------------------------------------


async def leased(store: SqliteStore, count: int = 1) -> None:
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout(f"r{n}", "run", Task(n), "g") for n in range(count)])
    await store.lease("run", "w", limit=count, ttl=3600)


async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    """What waits, what runs with its calls so far, and what has ended."""
    store = SqliteStore(tmp_path / "s.db")
    await leased(store, 2)
    call = Transition("r0", 1, 0, "c", token_ids([1, 2]), token_ids([3]), logprobs([-0.5]))
    await store.append([call])
    await store.complete("r1", 1, Outcome(reward=0.999))
    await store.create_rollouts([Rollout("r2", "run", Task(2), "g")])
    await store.close()
    again = SqliteStore(tmp_path / "s.db")
    await again.open()
    found = (await again.list_rollouts("run")).items
    assert [(r.id, r.status, r.reward) for r in found] == [
        ("r0", Status.RUNNING, None),
        ("r1", Status.SUCCEEDED, 0.999),
        ("r2", Status.PENDING, None),
    ]
    assert await again.transitions("r0") == [call]
    assert (await again.complete("r0", 1, Outcome(reward=1.0))).reward == 1.0
    await again.close()


async def test_a_failure_has_no_reward() -> None:
    store = MemoryStore()
    await leased(store)
    ended = await store.complete("r0", 1, Outcome(fault=Fault.AGENT, error="the agent's own"))
    assert (ended.status, ended.reward) == (Status.FAILED, None)
    await store.close()


async def test_a_second_reward_is_refused_also_after_the_end() -> None:
    store = MemoryStore()
    await leased(store)
    first = await store.complete("r0", 1, Outcome(reward=0.0))
    assert await store.complete("r0", 1, Outcome(reward=0.0)) == first
    for late in (Outcome(reward=1.0), Outcome(fault=Fault.AGENT)):
        with pytest.raises(StaleAttemptError, match="it has ended"):
            await store.complete("r0", 1, late)
    with pytest.raises(StoreError):
        await store.complete("r0", 2, Outcome(reward=1.0))
    assert await store.get_rollout("r0") == first
    await store.close()


async def test_all_rollouts_are_seen_however_many_pages_they_are() -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout(f"r{n}", "run", Task(n), f"g{n}") for n in range(2001)])
    assert [rollout.id for rollout in await all_rollouts(store, "run")] == [f"r{n}" for n in range(2001)]
    await store.close()


async def test_all_named_rewards_of_an_outcome_are_kept() -> None:
    store = MemoryStore()
    await leased(store)
    named = {"f1": 0.25, "format": 1.0, "length": -0.5}
    await store.complete("r0", 1, Outcome(reward=0.75, rewards=named))
    found = await store.get_rollout("r0")
    assert found is not None
    assert (found.reward, found.rewards) == (0.75, named)
    await store.close()


TURNS = st.lists(
    st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
)


@given(calls=TURNS, grow=st.booleans())
def test_every_response_token_is_trained_once_and_no_other_ever(
    calls: list[tuple[list[int], list[int]]], grow: bool
) -> None:
    """However calls repeat, extend or contain one another: no token of a response is left out, none of a prompt is trained."""
    if grow:  # a conversation: each prompt is all that came before, and something new
        history: list[int] = []
        for place, (prompt, response) in enumerate(calls):
            history = [*history, *prompt]
            calls[place] = (list(history), response)
            history = [*history, *response]
    trajectory = make_trajectory([(tuple(prompt), tuple(response)) for prompt, response in calls])
    rows = build_samples([trajectory], [[1.0] * len(calls)])
    seen = []
    for row in rows:
        inside = np.zeros(len(row), dtype=bool)
        for span in row.spans:
            assert not inside[span.start : span.stop].any()
            inside[span.start : span.stop] = True
            prompt, response = calls[span.seq]
            assert row.ids[span.start : span.stop].tolist() == response
            assert row.ids[: span.start].tolist() == prompt
            seen.append(span.seq)
        assert ((row.weights != 0) == inside).all()
    assert sorted(seen) == list(range(len(calls)))
