"""The conformance kit: tests of all that an adapter has to do. Subclass `AdapterContract` and run pytest.

The invariant: the checks know no framework; they look at the requests that reached the policy server and at the store.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest

from lightning.instrument import activate
from lightning.plugins import plugins
from lightning.plugins.attached_adapters import failed_adapter
from lightning.testing.contract_harness import (
    CAPABILITIES,
    ContractHarness,
    Make,
    calculator,
    check,
    in_thread,
    named,
    traces,
    unbroken,
)
from lightning.testing.contract_house import Ran, with_sorted_results
from lightning.testing.contract_script import BAD, HANG, INVENT, INVENTED, REFUSE, ReplyFormat
from lightning.testing.public_imports import FOR_ADAPTERS, check_imports
from lightning.testing.vllm_replies import Reply
from lightning.types import CallStatus, StepState, ToolEvent

SETTLED = 0.2
"""Seconds that a call hangs before its run is cancelled. In Python 3.11 `asyncio.wait_for`, with which LangChain waits for each
part of a stream, loses a cancellation that comes together with the part (python/cpython#86296)."""


__all__ = ["CAPABILITIES", "AdapterContract"]

CONCURRENT = 8
THREADS = 4


class AdapterContract(ContractHarness):
    """The kit. Give a subclass named `Test...` the plugin's name, what it claims, and a few small agents:

        class TestAcme(AdapterContract):
            adapter = "acme"                                    # the entry point's name, up to the dot
            capabilities = frozenset({"tools", "stream"})       # of CAPABILITIES; the rest is skipped, saying so

            def solver(self, llm, dialect="chat"): ...
            async def run(self, agent, text, *, stream=False): ...

    Everything runs against the real gateway and store and a scripted policy server, with the network held to the
    loopback address. A failing check says what the adapter did wrong.
    """

    # who is calling -----------------------------------------------------------------------------------------------
    def test_every_call_is_named(self) -> None:
        """Each model call carries its agent's name, a path that holds it, and token ids."""
        ran = self.go(self.solver)
        self.solved(ran)
        for call in ran.calls:
            check(
                call.caller.agent == "solver",
                f"call {call.seq} is named {named(call.caller)}, but the agent is called 'solver'. "
                "lightning_identify() is asked in the task that sends the request: what did it see there?",
            )
            check(
                call.caller.agent in call.caller.path,
                f"call {call.seq} has the path {call.caller.path}: it runs outermost to innermost and includes the agent",
            )
            check(call.caller.framework, f"call {call.seq}: Caller.framework is empty; say your framework's name")
            check(call.prompt_ids and call.response_ids, f"call {call.seq} has no token ids")

    def test_two_agents_keep_their_names(self) -> None:
        """Agents that run after one another do not inherit each other's names."""
        self.need("pair")
        ran = self.go(self.pair)
        check(
            ran.agents == ["writer", "checker"],
            f"`pair` runs writer, then checker, with one model call each; the calls are named {ran.agents}",
        )

    def test_nested_parallel_agents_keep_their_names(self) -> None:
        """Agents inside tools of an agent, at the same time: each call has its own agent and its whole path."""
        self.need("nested")
        ran = self.go(self.boss)
        inner = [name for name in ran.agents if name != "boss"]
        check(
            sorted(inner) == ["echo"] + ["solver"] * self.solver_calls(),
            f"inside `boss`, solver makes {self.solver_calls()} calls and echo one; the calls are named {ran.agents}",
        )
        check(
            ran.agents[0] == ran.agents[-1] == "boss",
            f"boss calls first and last, and the calls in order are named {ran.agents}",
        )
        for agent, tool in (("solver", "ask_math"), ("echo", "ask_echo")):
            for call in ran.calls:
                if call.caller.agent == agent:
                    check(
                        _in_order(("boss", tool, agent), call.caller.path),
                        f"a call of {agent} has the path {call.caller.path}; it should hold boss, {tool} and {agent}, in "
                        "this order: the path runs from the outermost agent through tools to the innermost agent",
                    )

    def test_calls_have_spans(self) -> None:
        """Each model call has a span id of its own, and a parent."""
        self.need("spans")
        ran = self.go(self.solver)
        spans = [call.caller.span_id for call in ran.calls]
        check(all(spans), f"Caller.span_id is empty in {[named(call.caller) for call in ran.calls]}")
        check(
            len(set(spans)) == len(spans),
            f"two model calls share a span id: {spans}; it is the call's, not the agent's",
        )
        for call in ran.calls:
            parent = call.caller.parent_id
            check(
                parent and parent != call.caller.span_id,
                f"call {call.seq} has span {call.caller.span_id!r} and parent {parent!r}: the parent is what the call ran in",
            )

    def test_identify_is_steady(self) -> None:
        """`lightning_identify()` says the same when asked again, and nothing where no agent runs."""
        answers: list[list[object]] = []

        def thrice(ask: Callable[[], object]) -> Callable[[], object]:
            def asked() -> object:
                answers.append([ask() for _ in range(3)])
                return answers[-1][0]

            return asked

        with self.identify(thrice), self.installed():
            self.nobody("before any agent ran")
            answers.clear()
            self.solved(unbroken(self.play(self.solver)))
            seen = [item for item in answers if item[0] is not None]
            self.nobody("after the rollout")
            in_thread(lambda: self.nobody("in a thread of its own, after the rollout"))
        check(len(seen) >= 2, "lightning_identify() was not asked for each model call, or did not know who was calling")
        for first, *others in seen:
            check(
                all(other == first for other in others),
                f"lightning_identify() said {first}, and asked again at once {others}: asking must change nothing",
            )

    # what the agent does ------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("text", ["hi", BAD])
    @pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
    def test_agent_is_unchanged(self, text: str, stream: bool) -> None:
        """With the adapter and without it: the same final text, the same requests, byte by byte."""
        if stream:
            self.need("stream")
        self._unchanged(self.solver, text, stream=stream)

    @pytest.mark.parametrize("which", ["pair", "boss"])
    def test_agents_are_unchanged(self, which: str) -> None:
        """The same for several agents; parallel ones may send their requests in any order."""
        self.need({"pair": "pair", "boss": "nested"}[which])
        self._unchanged(getattr(self, which), "hi", stream=False)

    def _unchanged(self, make: Make, text: str, *, stream: bool) -> None:
        with self.without():
            alone = self.play(make, text, stream=stream)
        if alone.error is not None:
            raise alone.error
        check(not self.emitted, f"without the adapter it still reported {self.emitted}")
        beside = self.go(make, text, stream=stream)
        check(
            beside.answer.encode() == alone.answer.encode(),
            f"without the adapter the agent says {alone.answer!r}, with it {beside.answer!r}",
        )
        arranged = with_sorted_results if self.results_as_tools_end else str
        bodies = [sorted(map(arranged, ran.bodies)) for ran in (beside, alone)]
        for ours, its in zip(*bodies, strict=False):
            check(ours == its, f"with the adapter the agent sends another request.\nwithout: {its}\nwith:    {ours}")
        check(
            len(beside.bodies) == len(alone.bodies),
            f"without the adapter the agent makes {len(alone.bodies)} model calls, with it {len(beside.bodies)}",
        )

    def test_streaming_equals_plain(self) -> None:
        """A streamed run leaves the same transitions as a plain one."""
        self.need("stream")
        plain, streamed = self.go(self.solver), self.go(self.solver, stream=True)
        self.solved(streamed)
        check(
            streamed.answer == plain.answer,
            f"plain the agent says {plain.answer!r}, streaming {streamed.answer!r}",
        )
        check(
            traces(streamed) == traces(plain),
            f"the calls of a streamed run differ from a plain one's:\nplain:    {traces(plain)}\nstreamed: {traces(streamed)}",
        )

    @pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
    @pytest.mark.parametrize("dialect", ["responses", "messages"])
    def test_dialects_are_named(self, dialect: str, stream: bool) -> None:
        """The agent calls another API than chat: the same names, the same sampled tokens."""
        self.need(dialect)
        if stream:
            self.need("stream")
        ran = self.go(functools.partial(self.solver, dialect=dialect), stream=stream)
        self.solved(ran)
        self.all_named(ran, f"through {dialect}")
        expected = [list(call.response_ids) for call in self.go(self.solver).calls]
        got = [list(call.response_ids) for call in ran.calls]
        check(
            got == expected, f"the tokens sampled through {dialect} differ from those through chat: {got}, {expected}"
        )

    # tools --------------------------------------------------------------------------------------------------------
    def test_tools_are_reported(self) -> None:
        """Each run of a tool is one event, with its status and the agent that called it; a raising tool is an error."""
        self.need("tools")
        ran = self.go(self.solver, BAD)
        self.solved(ran, tools=2)
        events = calculator(ran)
        check(
            [event.status for event in events] == ["error", "ok"],
            f"the tool raised, then worked; its events say {[(event.name, event.status) for event in ran.events]}: one "
            "event for each run, 'error' when it raised (even if the framework makes a text of that), 'ok' when not",
        )
        check(
            "bad expression" in events[0].error, f"ToolEvent.error is {events[0].error!r}, without what the tool raised"
        )
        check("42" in events[1].output, f"ToolEvent.output is {events[1].output!r}; the tool returned 42")
        for event in events:
            caller = event.caller
            check(
                caller is not None and "solver" in caller.path,
                f"the event of calculator says that {named(caller)} called it; solver did",
            )

    @pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
    def test_invented_tools_are_reported(self, stream: bool) -> None:
        """A tool that the model has invented is one event, with its id and arguments, whether the agent goes on or gives up."""
        self.need("tools")
        if type(self.replies).calls is not ReplyFormat.calls:
            pytest.skip(f"the model's calls are text for {self.adapter}: the gateway cannot know what the text calls")
        if stream:
            self.need("stream")
        with self.installed():
            ran = self.play(self.solver, INVENT, stream=stream)
        invented = [event for event in ran.events if event.name != "calculator"]
        check(
            [(event.name, event.status, event.kind, event.arguments) for event in invented]
            == [(INVENTED, "error", "unknown_tool", {"query": "x"})],
            f"the model called {INVENTED}, which the agent does not have; reported besides calculator: {invented}. The gateway "
            "tells of it, so an adapter says nothing, or the same name and call id with the status 'error'",
        )
        check(
            invented[0].call_id in ran.calls[0].tool_calls,
            f"the model called it as {ran.calls[0].tool_calls}; ToolEvent.call_id is {invented[0].call_id!r}",
        )
        caller = invented[0].caller
        check(
            caller is not None and "solver" in caller.path,
            f"its event says that {named(caller)} called it; solver did",
        )
        if ran.error is None:
            self.solved(ran, tools=2)
            check([event.status for event in calculator(ran)] == ["ok"], f"calculator ran once; reported: {ran.events}")

    def test_tool_events_name_their_call(self) -> None:
        """An event's call id is one that the model gave in this rollout, a different one for each run."""
        self.need("tool_call_ids")
        ran = self.go(self.solver, BAD)
        asked = [name for call in ran.calls for name in call.tool_calls]
        got = [event.call_id for event in calculator(ran)]
        check(
            got == [name for name in asked if name in got] and len(set(got)) == 2,
            f"the model called tools under the ids {asked}; ToolEvent.call_id of the runs: {got}",
        )

    def test_nested_tools_name_their_call(self) -> None:
        """Tools that hold agents, and the tools of those agents: every event's call id is in the store."""
        self.need("tool_call_ids")
        self.need("nested")
        ran = self.go(self.boss)
        asked = {name for call in ran.calls for name in call.tool_calls}
        for event in ran.events:
            check(
                event.call_id in asked,
                f"the event of {event.name} has the call id {event.call_id!r}; the model's are {sorted(asked)}",
            )
        names = sorted(event.name for event in ran.events)
        check(
            names == ["ask_echo", "ask_math", "calculator"],
            f"the tools ask_echo, ask_math and calculator ran once each; reported: {names}",
        )

    # what it is made of -------------------------------------------------------------------------------------------
    def test_imports_are_public(self) -> None:
        """The adapter's module imports nothing of lightning that may change without a word."""
        for info in plugins().plugins():
            if info.name == self.adapter:
                check_imports(info.target.partition(":")[0], *FOR_ADAPTERS)

    # side by side -------------------------------------------------------------------------------------------------
    def test_concurrent_rollouts_do_not_mix(self) -> None:
        """Rollouts at the same time on one loop: calls and events stay with their own."""

        async def all_at_once() -> list[Ran]:
            return await asyncio.gather(*(self.attempt(self.solver, "hi") for _ in range(CONCURRENT)))

        with self.installed():
            together = self.house.play(all_at_once())
        self._separate(together)

    def _separate(self, together: Sequence[Ran]) -> None:
        for ran in together:
            self.solved(unbroken(ran))
            self.all_named(ran, "in a rollout beside others")
            if "tools" in self.capabilities:
                count = len(calculator(ran))
                check(count == 1, f"a rollout beside others ran its tool once and has {count} events")

    def test_agent_in_a_thread(self) -> None:
        """An agent that runs in a bare thread, without the rollout's context, keeps its names and events."""
        self.need("threads")
        with self.installed():
            ran = self.house.play(self.attempt(self.solver, "hi", threaded=True))
        self._separate([ran])

    def test_concurrent_rollouts_in_threads(self) -> None:
        """Rollouts at the same time, each in a thread with its own context, as the inline runner has them."""
        self.need("threads")

        async def all_at_once() -> list[Ran]:
            loop = asyncio.get_running_loop()
            attempts = [
                loop.run_in_executor(
                    None, contextvars.copy_context().run, functools.partial(self.attempt_sync, self.solver, "hi")
                )
                for _ in range(THREADS)
            ]
            return await asyncio.gather(*attempts)

        with self.installed():
            together = self.house.play(all_at_once())
        self._separate(together)

    def test_own_processor_beside_ours(self) -> None:
        """The user's own callback sees what it saw before, and the adapter sees its own, whichever came first."""
        self.need("own_processor")
        with self.own_processor() as alone, self.without():
            self.play(self.solver)
        check(alone, "own_processor() saw nothing of a run without the adapter: is it attached inside its block?")
        with self.own_processor() as before, self.installed():
            first = unbroken(self.play(self.solver))
        with self.installed(), self.own_processor() as after:
            second = unbroken(self.play(self.solver))
        for ran, seen, order in ((first, before, "before"), (second, after, "after")):
            check(
                len(seen) >= len(alone),
                f"the user's own processor, attached {order} the adapter, saw {len(seen)} things instead of {len(alone)}",
            )
            self.all_named(ran, "beside a user's processor")
            if "tools" in self.capabilities:
                check(len(calculator(ran)) == 1, f"beside a user's processor the tool's events are {ran.events}")
        with self.own_processor() as seen:
            with self.installed():
                self.play(self.solver)
            count = len(seen)
            with self.without():
                self.play(self.solver)
        check(len(seen) > count, "uninstalling the adapter took the user's own processor away")

    # faults: after each of them the next rollout is named and reported as if nothing had happened ------------------------
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
        """Check that `leftovers` is empty."""
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
        """The receiver of events raises: the agent goes on."""

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
        """The policy server refuses a call: the agent's user sees the error, and no state is left."""
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
        """The run is cancelled while the model is sampling: its call is aborted, and no state is left."""
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
        """Abandon a run during its first model call. Return the user's text, which no other run has."""
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


def _in_order(names: Sequence[str], path: Sequence[str]) -> bool:
    """Whether the names stand in a path, in this order, with anything between them."""
    rest = iter(path)
    return all(name in rest for name in names)
