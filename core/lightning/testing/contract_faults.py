"""What the conformance kit does to an adapter: takes it away, breaks what it reports to, cancels its agents.

The invariant: after each fault the next rollout is named and reported as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import NoReturn

import pytest

from lightning.instrument import activate
from lightning.plugins.attached_adapters import failed_adapter
from lightning.testing.contract_harness import CAPABILITIES, ContractHarness, calculator, check, unbroken
from lightning.testing.contract_house import Ran
from lightning.testing.contract_script import BAD, HANG, REFUSE
from lightning.testing.vllm_replies import Reply
from lightning.types import CallStatus, StepState, ToolEvent

SETTLED = 0.2
"""Seconds that a call hangs before its run is cancelled. In Python 3.11 `asyncio.wait_for`, with which LangChain waits for each
part of a stream, loses a cancellation that comes together with the part (python/cpython#86296)."""


class FaultChecks(ContractHarness):
    """The part of `AdapterContract` that is about faults; see there."""

    def test_uninstalling_leaves_no_trace(self) -> None:
        """After the undo the adapter hears nothing; installed again, it reports everything once."""
        self.solved(self.go(self.solver))
        first = len(self.emitted)
        self.clean("after the adapter was uninstalled")
        with self.without():
            bare = self.play(self.solver)
        self.solved(bare)
        check(len(self.emitted) == first, f"uninstalled, the adapter still reported {self.emitted[first:]}")
        again = self.go(self.solver)
        check(
            len(self.emitted) == 2 * first,
            f"installed for the first time it reported {first} events of a run, installed again "
            f"{len(self.emitted) - first}: lightning_install's undo has to take back all that it attached",
        )
        self.all_named(again, "installed again,")

    def clean(self, when: str) -> None:
        """Check `leftovers`."""
        left = self.leftovers()
        check(not left, f"{when} it still holds {left!r}")

    def test_retries_keep_one_identity(self) -> None:
        """A call that the client sends again is the same call: same agent, same span."""
        self.house.fake.queue(Reply(status=500))
        ran = self.go(self.solver)
        self.solved(ran, failed=1)
        statuses = [call.status for call in ran.calls]
        check(
            statuses == [CallStatus.ERROR] + [CallStatus.OK] * self.solver_calls(),
            f"the policy server failed once and the client should have tried again; the calls were {statuses}",
        )
        failed, retried, following, *_ = (call.caller for call in ran.calls)
        check(failed == retried, f"the failed call is {failed}, its retry {retried}: they are one call")
        if "spans" in self.capabilities:
            check(following.span_id != retried.span_id, f"the next call has the span of the one before: {following}")

    def test_broken_receiver_does_not_break_the_agent(self) -> None:
        """What receives events raises: the agent goes on."""

        def broken(event: ToolEvent | StepState) -> NoReturn:
            raise RuntimeError(f"the kit's receiver is broken ({event.name})")

        with self.installed(broken):
            ran = self.play(self.solver, BAD)
        self.solved(ran, tools=2)
        self.all_named(ran, "with a broken receiver", self.solver_calls(tools=2))

    def test_broken_identify_does_not_break_the_agent(self) -> None:
        """`lightning_identify` raises: the agent goes on, and the calls are marked."""

        def broken() -> NoReturn:
            raise RuntimeError("the kit broke lightning_identify")

        with self.identify(lambda _: broken), self.installed():
            ran = self.play(self.solver)
        self.solved(ran)
        marks = {failed_adapter(call.caller) for call in ran.calls}
        check(marks == {self.adapter}, f"the calls of a failing adapter should be marked with its name, not {marks}")

    def test_provider_failure_surfaces(self) -> None:
        """The policy server refuses: the agent's user sees it, and nothing of it is left."""
        with self.installed():
            ran = self.play(self.solver, REFUSE)
            check(
                ran.error is not None,
                f"the model call failed and the agent answered {ran.answer!r}: who hid the failure?",
            )
            self._next_is_named("a failed model call")
        self.clean("after a failed model call, a good run and its uninstallation")

    @pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
    def test_cancelling_leaves_no_state(self, stream: bool) -> None:
        """The run is cancelled while the model is sampling: its call is aborted, and nothing of it is left."""
        self.need("cancel")
        if stream:
            self.need("stream")
        with self.installed():
            cancelled = self.house.play(self._cancelled(stream=stream))
            check(
                [call.caller.agent for call in cancelled.calls] == ["solver"],
                f"the cancelled call is named {cancelled.agents}",
            )
            statuses = [call.status for call in cancelled.calls]
            check(
                statuses == [CallStatus.ABORTED],
                f"the call of a cancelled run is {statuses}, not aborted: was the connection left open?",
            )
            self._next_is_named("a cancelled run")
        self.clean("after a cancelled run, a good run and its uninstallation")

    async def _cancelled(self, *, stream: bool) -> Ran:
        fake = self.house.fake
        before, gone = len(fake.requests), len(fake.aborted)
        lease, llm = self.house.lease()
        with activate(llm) as active:
            context = contextvars.copy_context()
            running = asyncio.create_task(self.run(self.solver(llm), HANG, stream=stream), context=context)
            await self.house.until(lambda: len(fake.requests) > before or running.done(), "the first model call")
            await asyncio.sleep(SETTLED)
            running.cancel()
            done, _ = await asyncio.wait({running}, timeout=10.0)
            check(done, "the run was cancelled and goes on: something swallows asyncio.CancelledError")
            context.run(self.nobody, "after the run was cancelled, in the same task")
            await self.house.until(lambda: len(fake.aborted) > gone, "the policy server to be told that the call ended")
            await self.house.until(lambda: bool(self.house.calls(lease)), "the aborted call in the store")
        error = None if running.cancelled() else running.exception()
        check(running.cancelled() or error is not None, "a cancelled run returned as if it had ended")
        return self.house.finish(lease, active, "", error or asyncio.CancelledError())

    def test_abandoned_run_leaves_no_state(self) -> None:
        """A run that cannot be cancelled is left alone while the model is sampling: it goes on, and no other run notices."""
        if "cancel" in self.capabilities:
            pytest.skip(
                f"the adapter {self.adapter} claims 'cancel' ({CAPABILITIES['cancel']}): nothing is left to go on"
            )
        before = len(self.house.fake.requests)

        def asked(text: str) -> int:
            return sum(text in body for body in self.house.bodies(before))

        with self.installed():
            text = self.house.play(self._abandoned(asked))
            self._next_is_named("an abandoned run")
            self.house.play(
                self.house.until(lambda: asked(text) >= self.solver_calls(), "the abandoned run's other calls")
            )
        self.house.play(self.house.until(lambda: not self.leftovers(), "the abandoned run to leave nothing"))

    async def _abandoned(self, asked: Callable[[str], int]) -> str:
        """Give a run up during its first model call; the user's text, which no other run has."""
        lease, llm = self.house.lease()
        text = lease.rollout.id
        with activate(llm), self.house.paused():
            context = contextvars.copy_context()
            running = asyncio.create_task(self.run(self.solver(llm), text), context=context)
            await self.house.until(lambda: asked(text) > 0 or running.done(), "the first model call")
            check(not running.done(), "run() blocks the event loop: run the agent in `await asyncio.to_thread(...)`")
            running.cancel()
            await asyncio.wait({running})
            context.run(self.nobody, "after the run was abandoned, in the same task")
        return text

    def _next_is_named(self, what: str) -> None:
        self.nobody(f"after {what}")
        following = unbroken(self.play(self.solver))
        self.solved(following)
        self.all_named(following, f"after {what}, in the next run,")
        if "tools" in self.capabilities:
            check(len(calculator(following)) == 1, f"after {what} the next run's events are {following.events}")
