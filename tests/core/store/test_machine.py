"""A store against a model of it: any order of leases, expiries, retries, duplicates, late writers, appends and commits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lightning.errors import ConflictError, StaleAttemptError
from lightning.store import Store
from lightning.store.rollout_state import EXCUSED
from lightning.types import (
    Caller,
    Fault,
    Lease,
    Outcome,
    Rollout,
    Run,
    Status,
    StepRecord,
    StepReward,
    Task,
    Transition,
    logprobs,
    token_ids,
)

from tests.servers.stores import is_served

OUTCOMES = (
    Outcome(reward=1.0),
    Outcome(reward=0.0, step_rewards=(StepReward(0.5),)),
    Outcome(reward=0.0, labels={"c0": Caller("writer"), "c1": Caller("b", ("a", "b"))}),
    Outcome(fault=Fault.AGENT, error="raised", untrained={"c0": "rejected", "c2": "title"}),
    Outcome(fault=Fault.CANCELLED, error="wanted no more"),
    Outcome(fault=Fault.INFRASTRUCTURE, error="lost"),
)

WORKERS = ("w1", "w2")
BACK = st.sampled_from((0, 0, 0, 1, -1))
"""How far behind the current attempt a writer is: mostly not at all."""
PROMPTS = ((), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (1, 2, 9), tuple(range(50)))


@dataclass
class Model:
    """What a rollout should be."""

    id: str
    group: str
    max_attempts: int
    status: Status = Status.PENDING
    attempt: int = 0
    spent: int = 0
    worker: str = ""
    expired: bool = False
    reward: float | None = None
    trained: int | None = None
    uses: int = 0
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    calls: dict[tuple[int, int], Transition] = field(default_factory=dict)

    def called(self, attempt: int) -> list[Transition]:
        """The calls of an attempt under the names they have by now."""
        labels = self.outcomes[attempt].labels if attempt in self.outcomes else {}
        calls = [self.calls[key] for key in sorted(self.calls) if key[0] == attempt]
        why = self.outcomes[attempt].untrained if attempt in self.outcomes else {}
        return [
            replace(call, caller=labels.get(call.id, call.caller), untrained=why.get(call.id, call.untrained))
            for call in calls
        ]

    def may_write(self, attempt: int) -> bool:
        return self.status is Status.RUNNING and self.attempt == attempt


class StoreMachine(RuleBasedStateMachine):
    """`make_store` is set by the test that runs the machine."""

    make_store: Callable[[], Store]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = type(self).make_store()
        self.models: dict[str, Model] = {}
        self.leases: list[Lease] = []
        self.steps: list[StepRecord] = []

    @initialize()
    def begin(self) -> None:
        self.runner.run(self.store.open())
        self.runner.run(self.store.put_run(Run("run", "machine")))

    def teardown(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()

    def pick(self, data: st.DataObject) -> Model:
        return self.models[data.draw(st.sampled_from(sorted(self.models)))]

    @rule(count=st.integers(1, 3), max_attempts=st.integers(1, 2), group=st.sampled_from("gh"), again=st.booleans())
    def create(self, count: int, max_attempts: int, group: str, again: bool) -> None:
        first = 0 if again else len(self.models)
        names = [f"r{first + i:03}" for i in range(count)]
        rollouts = [Rollout(n, "run", Task(n), group, max_attempts=max_attempts) for n in names]
        new = [r for r in rollouts if r.id not in self.models]
        assert self.runner.run(self.store.create_rollouts(rollouts)) == len(new)
        self.models |= {r.id: Model(r.id, group, max_attempts) for r in new}

    @rule(worker=st.sampled_from(WORKERS), limit=st.integers(0, 3), short=st.booleans())
    def lease(self, worker: str, limit: int, short: bool) -> None:
        for model in self.models.values():
            if model.status is Status.RUNNING and model.expired and model.spent >= model.max_attempts:
                model.status = Status.FAILED
        ready = [
            m for m in self.models.values() if m.status is Status.PENDING or (m.status is Status.RUNNING and m.expired)
        ]
        found = self.runner.run(self.store.lease("run", worker, limit=limit, ttl=0 if short else 3600))
        assert [x.rollout.id for x in found] == [m.id for m in ready[:limit]]
        for held in found:
            model = self.models[held.rollout.id]
            model.status, model.worker, model.expired = Status.RUNNING, worker, short
            model.attempt += 1
            model.spent += 1
            assert held.attempt == model.attempt
        self.leases += found

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), short=st.booleans())
    def renew(self, data: st.DataObject, short: bool) -> None:
        held = data.draw(st.sampled_from(self.leases))
        model = self.models[held.rollout.id]
        try:
            self.runner.run(self.store.renew(held, ttl=0 if short else 3600))
        except StaleAttemptError:
            assert not model.may_write(held.attempt)
        else:
            assert model.may_write(held.attempt)
            model.expired = short

    @precondition(lambda self: self.models)
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES), back=BACK, spend=st.booleans())
    def complete(self, data: st.DataObject, outcome: Outcome, back: int, spend: bool) -> None:
        model = self.pick(data)
        attempt = model.attempt - back
        try:
            found = self.runner.run(self.store.complete(model.id, attempt, outcome, spend=spend))
        except StaleAttemptError:
            assert not model.may_write(attempt)
            assert model.outcomes.get(attempt) != outcome
            return
        if model.outcomes.get(attempt) != outcome:
            assert model.may_write(attempt)
            model.outcomes[attempt] = outcome
            model.reward = outcome.reward
            lost = outcome.fault is Fault.INFRASTRUCTURE
            excused = lost and not spend and model.attempt - model.spent < EXCUSED and not is_served(self.store)
            retry = excused or (lost and model.spent < model.max_attempts)
            model.spent -= excused
            unwanted = outcome.fault is Fault.CANCELLED
            ended = Status.SUCCEEDED if outcome.reward is not None else Status.CANCELLED if unwanted else Status.FAILED
            model.status = Status.PENDING if retry else ended
        assert (found.status, found.reward) == (model.status, model.reward)

    @rule(worker=st.sampled_from(WORKERS))
    def release(self, worker: str) -> None:
        held = [m for m in self.models.values() if m.status is Status.RUNNING and m.worker == worker]
        assert self.runner.run(self.store.release(worker)) == len(held)
        for model in held:
            model.status = Status.PENDING
            model.spent -= 1

    @precondition(lambda self: self.models)
    @rule(
        data=st.data(),
        back=BACK,
        calls=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(PROMPTS), st.integers(0, 1)), max_size=3),
    )
    def append(self, data: st.DataObject, back: int, calls: list[tuple[int, tuple[int, ...], int]]) -> None:
        model = self.pick(data)
        attempt = model.attempt - back
        given = [
            Transition(
                model.id,
                attempt,
                seq,
                f"c{seq}",
                token_ids(prompt),
                token_ids([choice, 8]),
                logprobs([-0.5, float("-inf")]),
                tool_calls=(f"t{seq}",) * choice,
                extras={"texts": bytes((seq,)), "other": b""} if choice else {},
            )
            for seq, prompt, choice in calls
        ]
        stored, expected = dict(model.calls), None
        for call in given:
            known = stored.get((attempt, call.seq))
            if known is None and not model.may_write(attempt):
                expected = StaleAttemptError
            elif known is not None and known != call:
                expected = ConflictError
            else:
                stored[attempt, call.seq] = call
                continue
            break
        if expected is not None:
            with pytest.raises(expected):
                self.runner.run(self.store.append(given))
            return
        assert self.runner.run(self.store.append(given)) == len(stored) - len(model.calls)
        model.calls = stored

    @precondition(lambda self: self.models)
    @rule(data=st.data(), again=st.booleans(), ready=st.booleans(), limit=st.integers(0, 2))
    def commit(self, data: st.DataObject, again: bool, ready: bool, limit: int) -> None:
        if again and self.steps:
            self.runner.run(self.store.commit_step(data.draw(st.sampled_from(self.steps))))
            return
        names = [m.id for m in self.models.values() if m.status is Status.SUCCEEDED or not ready] or list(self.models)
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
        models = [self.models[name] for name in chosen]
        step = len(self.steps) + 1
        rollouts = tuple((m.id, m.attempt) for m in models)
        groups = tuple(sorted({m.group for m in models}))
        declared = data.draw(st.sampled_from([[], *([name] for name in chosen), chosen]))
        context = {"reuse": {"limit": limit, "rollouts": declared}} if declared else {}
        made = StepRecord(
            "run", step, step, rollouts, ("d",) * len(models), f"digest {step}", at=1.0, groups=groups, context=context
        )
        fits = all(0 < m.uses <= limit if m.id in declared else m.uses == 0 for m in models)
        if fits and all(m.status is Status.SUCCEEDED for m in models):
            self.runner.run(self.store.commit_step(made))
            self.steps.append(made)
            for model in models:
                model.uses += 1
                model.trained = step if model.trained is None else model.trained
        else:
            with pytest.raises((StaleAttemptError, ConflictError)):
                self.runner.run(self.store.commit_step(made))

    @invariant()
    def the_store_is_the_model(self) -> None:
        found = self.runner.run(self.store.list_rollouts("run")).items if self.models else ()
        assert [(r.id, r.status, r.attempt, r.reward, r.trained_at_step, r.max_attempts, r.group) for r in found] == [
            (m.id, m.status, m.attempt, m.reward, m.trained, m.max_attempts, m.group) for m in self.models.values()
        ]

    @precondition(lambda self: self.models)
    @invariant()
    def every_call_is_there(self) -> None:
        attempts = [(m.id, attempt) for m in self.models.values() for attempt in range(m.attempt + 1)]
        found = self.runner.run(self.store.transitions_of(attempts))
        for (name, attempt), calls in zip(attempts, found, strict=True):
            assert calls == self.models[name].called(attempt)

    @precondition(lambda self: self.steps)
    @invariant()
    def every_step_is_there(self) -> None:
        assert self.runner.run(self.store.steps("run")) == self.steps


@pytest.mark.slow
def test_any_order_of_operations(make_store: Callable[[], Store], request: pytest.FixtureRequest) -> None:
    run_machine(StoreMachine, make_store, request.node.name)


def run_machine(kind: type[StoreMachine], make_store: Callable[[], Store], test: str) -> None:
    """Run a machine on the stores that this test has."""
    machine = type("Machine", (kind,), {"make_store": staticmethod(make_store)})
    # A server answers a hundred times slower than a library, and it is asked for everything after each step.
    examples = 40
    if "postgres" in test:
        examples = 10
    if "http" in test:
        examples = 6  # what is behind the API is the store of the other machines
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))
