"""How the conformance kit runs an adapter's agents: the methods that a subclass supplies, and the part of the runner.

The invariant: a rollout here takes the same way as in training (tap, adapter by its entry point, `activate`, gateway, store),
so what a check reads is what would be trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

import pluggy
import pytest

from lightning.errors import DataError, LightningError
from lightning.instrument import activate, emit, install_tap
from lightning.plugins import plugins
from lightning.plugins.attached_adapters import failed_adapter
from lightning.testing.contract_house import LIMIT, House, Ran
from lightning.testing.contract_script import ANSWER, ReplyFormat
from lightning.testing.network import hold_network
from lightning.types import LLM, Caller, StepState, ToolEvent, as_texts

CAPABILITIES = {
    "tools": "reports each run of a tool with its status",
    "tool_call_ids": "reports the id of the model's call that a tool ran for",
    "cancel": "a run that is cancelled ends its model call",
    "stream": "`run(..., stream=True)`",
    "pair": "`pair`, two agents after one another",
    "nested": "`boss`, agents inside an agent's tools, in parallel",
    "spans": "gives each model call a span id",
    "threads": "agents may run in threads, by `run_sync`",
    "responses": "`solver(llm, 'responses')`, the OpenAI Responses API",
    "messages": "`solver(llm, 'messages')`, the Anthropic Messages API",
    "own_processor": "`own_processor`, the user's own callbacks beside the adapter's",
}
"""The capabilities that an adapter may claim, each with what the adapter then has to do or to supply."""

KEYS = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "LANGSMITH_API_KEY")
"""Variables of the machine that runs the kit; an agent must not find them."""

_HOUSE = pytest.StashKey[House]()

Make = Callable[[LLM], object]
T = TypeVar("T")


class ContractHarness:
    """The methods with which the checks of `AdapterContract` are written."""

    adapter: ClassVar[str] = ""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    replies: ClassVar[ReplyFormat] = ReplyFormat()
    """How the framework words requests to the model and its decisions, where it has no native tool calls."""
    results_as_tools_end: ClassVar[bool] = False
    """Whether the framework sends the results of tools that ran at once in the order in which they ended."""

    # what a subclass supplies -------------------------------------------------------------------------------------
    def solver(self, llm: LLM, dialect: str = "chat") -> object:
        """An agent called `solver` with the instructions "You are solver." and one tool.

        The tool is `calculator(expression: str) -> str`: it evaluates, and raises `ValueError("bad expression")` for "bad".
        What it raises reaches the model as the tool's result, in the framework's own way, and the agent goes on until the
        model answers in text. Leave the client's retries as the framework has them. `dialect` is the API to call:
        `chat`, and `responses` or `messages` if these are claimed.
        """
        raise NotImplementedError(f"{type(self).__name__}.solver")

    def pair(self, llm: LLM) -> object:
        """An agent `writer` ("You are writer."), then an agent `checker` ("You are checker.")."""
        raise NotImplementedError(f"{type(self).__name__}.pair")

    def boss(self, llm: LLM) -> object:
        """An agent `boss` ("You are boss.") whose tools are agents: `ask_math` runs `solver`, `ask_echo` runs `echo`.

        The model calls both at once, each with a text as its first parameter; run them in parallel, as far as the
        framework does. `echo` ("You are echo.") has no tools.
        """
        raise NotImplementedError(f"{type(self).__name__}.boss")

    async def run(self, agent: object, text: str, *, stream: bool = False) -> str:
        """Run an agent on a user's text, streaming if so wished, and return its final text. Close what you open.

        A framework that blocks its thread runs in another one: `await asyncio.to_thread(agent.run, text)`.
        """
        raise NotImplementedError(f"{type(self).__name__}.run")

    def run_sync(self, agent: object, text: str) -> str:
        """Run an agent in a thread without an event loop; by default `run` on a loop of its own."""
        return asyncio.run(self.run(agent, text))

    def own_processor(self) -> AbstractContextManager[list[object]]:
        """Attach the user's own callback or processor inside the block. Yields the list of what it has seen."""
        raise NotImplementedError(f"{type(self).__name__}.own_processor")

    def leftovers(self) -> object:
        """Return what is left of the adapter once it is uninstalled, in it and in the framework. It has to be empty."""
        return ()

    # the runner's part --------------------------------------------------------------------------------------------
    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        unknown = sorted({*as_texts(cls.capabilities, f"{cls.__name__}.capabilities")} - set(CAPABILITIES))
        if unknown:
            raise DataError(f"{cls.__name__}.capabilities has {unknown}; the kit knows {sorted(CAPABILITIES)}")

    @pytest.fixture(autouse=True)
    def _in_house(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Iterator[None]:
        """Give each test the servers, no keys of the machine, and no network but the loopback address."""
        if not self.adapter:
            pytest.fail(f"{type(self).__name__}.adapter: say the name of your plugin (its entry point's, up to a dot)")
        self.house = house_of(request.config)
        self.house.replies = self.replies
        self.emitted: list[ToolEvent | StepState] = []
        for name in KEYS:
            monkeypatch.delenv(name, raising=False)
        # Nothing here is encrypted, and reading the machine's certificates for each client is most of what a run costs.
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
        with hold_network() as refused:
            yield
        check(
            not refused,
            f"{', '.join(sorted(set(refused)))}: the framework or the adapter wanted to reach this. While the adapter is "
            "installed nothing may be sent anywhere but to the gateway (the kit refused it)",
        )

    def need(self, capability: str) -> None:
        """Skip a check if the adapter does not claim this capability."""
        if capability not in self.capabilities:
            pytest.skip(f"the adapter {self.adapter} does not claim {capability!r} ({CAPABILITIES[capability]})")

    @contextlib.contextmanager
    def installed(self, receiver: Callable[[ToolEvent | StepState], None] | None = None) -> Iterator[None]:
        """Install the adapter and the tap as the runner does. Fail the test if the adapter cannot be installed."""
        with _complaints() as said, contextlib.ExitStack() as undoing:
            undoing.callback(install_tap())
            try:
                undoing.callback(plugins().install_adapters(receiver or self._emit, [self.adapter]))
            except LightningError as error:
                pytest.fail(
                    f"{error} Is the package installed (pip install -e .), with its entry point?", pytrace=False
                )
            waiting = [info for info in plugins().plugins() if info.name == self.adapter and info.state == "waiting"]
            check(
                not waiting,
                f"the adapter {self.adapter} still waits for the import of {waiting and waiting[0].waits_for}: import the "
                "framework at the top of the test module",
            )
            check(not said, "\n".join(said))
            yield
            said.clear()
            undoing.close()
            check(not said, "\n".join(said))

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        """Install the tap alone, with no adapter."""
        with contextlib.ExitStack() as undoing:
            undoing.callback(install_tap())
            undoing.callback(plugins().install_adapters(self._emit, []))
            yield

    def solver_calls(self, tools: int = 1) -> int:
        """Return how many model calls the solver makes to call this many tools, one after the other, and to answer."""
        return tools + self.replies.answering_calls

    def solved(self, ran: Ran, tools: int = 1, failed: int = 0) -> None:
        """Check that the solver did its work: its answer, and the number of its calls, with `failed` further ones that
        failed."""
        __tracebackhide__ = True
        if ran.error is not None:
            raise ran.error
        expected = self.solver_calls(tools) + failed
        check(ANSWER in ran.answer, f"the solver's final text is {ran.answer!r}; the model said {ANSWER!r}")
        check(
            len(ran.calls) == expected,
            f"the solver makes {expected} model calls; in the store there are {len(ran.calls)}",
        )

    def all_named(self, ran: Ran, when: str, calls: int = 0) -> None:
        """Check that every call of a solver's run has its name. `calls` is their number, by default that for one tool."""
        __tracebackhide__ = True
        names = ["solver"] * (calls or self.solver_calls())
        check(ran.agents == names, f"{when} the calls are named {ran.agents}")

    def _emit(self, event: ToolEvent | StepState) -> None:
        self.emitted.append(event)
        emit(event)

    def go(self, make: Make, text: str = "hi", *, stream: bool = False) -> Ran:
        """Run a rollout with the adapter installed, as `play`; raise the agent's error."""
        with self.installed():
            ran = self.play(make, text, stream=stream)
        return unbroken(ran)

    def play(self, make: Make, text: str = "hi", *, stream: bool = False) -> Ran:
        """Run a rollout, on the loop of all agents, with whatever is installed now."""
        before = len(self.house.fake.requests)
        ran = self.house.play(self.attempt(make, text, stream=stream))
        return replace(ran, bodies=self.house.bodies(before))

    async def attempt(self, make: Make, text: str, *, stream: bool = False, threaded: bool = False) -> Ran:
        """Run a rollout in the current task; `threaded` runs the agent in a bare thread. The result holds the agent's error."""
        lease, llm = self.house.lease()
        answer, error = "", None
        with activate(llm) as active:
            try:
                async with asyncio.timeout(LIMIT):
                    if threaded:
                        answer = in_thread(lambda: self.run_sync(make(llm), text))
                    else:
                        answer = await self.run(make(llm), text, stream=stream)
            except Exception as raised:  # noqa: BLE001 — the checks look at it
                error = raised
            self.nobody("after the agent had ended, in the same task")
        return self.house.finish(lease, active, answer, error)

    def attempt_sync(self, make: Make, text: str) -> Ran:
        """Run a rollout in the current thread, by `run_sync`."""
        lease, llm = self.house.lease()
        answer, error = "", None
        with activate(llm) as active:
            try:
                answer = self.run_sync(make(llm), text)
            except Exception as raised:  # noqa: BLE001 — the checks look at it
                error = raised
        return self.house.finish(lease, active, answer, error)

    def nobody(self, when: str) -> None:
        """Check that the adapter names no caller where no agent runs. `when` is for the message."""
        caller = plugins().identify()
        check(
            caller is None or failed_adapter(caller),
            f"lightning_identify() answered {caller} {when}; outside an agent it has to be None, or another agent's "
            "calls get this name",
        )

    @contextlib.contextmanager
    def identify(self, wrap: Callable[[Callable[[], object]], Callable[[], object]]) -> Iterator[None]:
        """Wrap the adapter's `lightning_identify` for the block; install the adapter inside the block."""
        item = self._hook()
        original = item.function
        setattr(item, "function", wrap(original))  # noqa: B010 — pluggy calls it final, for mypy
        try:
            yield
        finally:
            setattr(item, "function", original)  # noqa: B010

    def _hook(self) -> pluggy.HookImpl:
        for item in plugins().hook.lightning_identify.get_hookimpls():
            if item.plugin_name == self.adapter:
                return item
        pytest.fail(f"the adapter {self.adapter} has no lightning_identify marked with @lightning.hookimpl")


def house_of(config: pytest.Config) -> House:
    """Return the servers of this test session, started at the first call."""
    if _HOUSE not in config.stash:
        house = House()
        house.start()
        config.stash[_HOUSE] = house
        config.add_cleanup(house.close)
    return config.stash[_HOUSE]


def check(condition: object, message: str) -> None:
    """Fail the test with a message for the adapter's author, unless the condition holds."""
    __tracebackhide__ = True
    if not condition:
        pytest.fail(message, pytrace=False)


def unbroken(ran: Ran) -> Ran:
    """Return a rollout after a check that its agent ended well and its adapter did not fail."""
    __tracebackhide__ = True
    if ran.error is not None:
        raise ran.error
    failed = any(failed_adapter(call.caller) for call in ran.calls)
    check(not failed, "lightning_identify() raised, or returned no lightning.Caller: see the captured log")
    return ran


def traces(ran: Ran) -> list[tuple[str, list[int]]]:
    """Return each call's agent and sampled token ids."""
    return [(call.caller.agent, list(call.response_ids)) for call in ran.calls]


def calculator(ran: Ran) -> list[ToolEvent]:
    """Return the events of the solver's tool."""
    return [event for event in ran.events if event.name == "calculator"]


def named(caller: Caller | None) -> str:
    """Describe a caller in a message."""
    return "nobody" if caller is None else f"{'/'.join(caller.path)} (agent {caller.agent!r})"


def in_thread(function: Callable[[], T]) -> T:
    """Run a function in a bare thread, which has no context of its own. Return its result, or raise its error."""
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 — carried over to the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=call, name="lightning-contract-agent", daemon=True).start()
    return outcome.result(LIMIT)


@contextlib.contextmanager
def _complaints() -> Iterator[list[str]]:
    """Collect the plugin manager's warnings about adapters inside the block."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.plugins.attached_adapters")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
