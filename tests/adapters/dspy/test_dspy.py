"""What DSPy's modules are called, its tools, threads, cache and HTTP client, with a model that fills in every field."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import dspy
import lightning
import lightning_dspy
import pytest
from dspy._vendor.lm15.transports import StdlibTransport, TransportRequest
from dspy.clients.cache import Cache
from dspy.predict import react
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError
from lightning.errors import PluginError
from lightning.instrument import ActiveAttempt, activate, current_caller, emit, install_tap
from lightning.plugins import plugins
from lightning.testing import ChatServer
from lightning.testing.chat_server import ChatRequest
from lightning.types import Caller
from lightning_dspy.methods import _warn_of_cache

FIELD = re.compile(r"`\[\[ ## (\w+) ## \]\]`")


def filled(fields: dict[str, str]) -> str:
    return "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in fields.items()) + "[[ ## completed ## ]]"


def uses(*tools: tuple[str, Any]) -> Callable[[ChatRequest], str]:
    """Fills in every field; in a `ReAct` it first uses each of the tools."""

    def answer(call: ChatRequest) -> str:
        fields = FIELD.findall(call.text)
        if "next_tool_name" in fields:
            name, arguments = [*tools, ("finish", {})][call.text.count("[[ ## observation_")]
            return filled({"next_thought": "so", "next_tool_name": name, "next_tool_args": json.dumps(arguments)})
        return filled({name: "42" for name in fields if name != "completed"})

    return answer


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer(answer=uses()) as running:
        yield running


@pytest.fixture
def session(server: ChatServer) -> Iterator[ActiveAttempt]:
    """A rollout with the adapter installed, and DSPy's language model for it."""
    undo = [install_tap(), plugins().install_adapters(emit, ["dspy"])]
    with activate(server.llm()) as active, contextlib.closing(lm(server)) as model, dspy.context(lm=model):
        yield active
    for each in undo:
        each()


def lm(server: ChatServer, **options: Any) -> dspy.LM:
    llm = server.llm()
    options = {"cache": False, "api_key": llm.api_key, **options}
    return dspy.LM(f"openai/{llm.model}", api_base=llm.base_url, **options)


def paths(server: ChatServer) -> list[str]:
    callers = [call.caller for call in server.calls]
    assert all(caller and caller.framework == "dspy" and caller.span_id and caller.parent_id for caller in callers)
    assert len({caller.span_id for caller in callers if caller}) == len(callers)
    return ["/".join(caller.path) for caller in callers if caller]


# names ------------------------------------------------------------------------------------------------------------------
QA = "question -> answer"


class BasicQA(dspy.Signature):
    """Answer."""

    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Predictor(dspy.Predict):
    """A class of the user's."""


class Pair(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.writer, self.checker = dspy.Predict(QA), dspy.ChainOfThought(QA)

    def forward(self, question: str) -> Any:
        return self.checker(question=self.writer(question=question).answer)


class Outer(dspy.Module):
    """Holds a program, lists, and a module that DSPy wraps around the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.drafting = Pair()
        self.judges = [dspy.Predict(QA), dspy.Predict(QA)]
        self.by_kind = {"a/b": dspy.Predict(QA)}
        self.best = dspy.BestOfN(module=Pair(), N=1, reward_fn=lambda args, pred: 1.0, threshold=1.0)

    def forward(self, question: str) -> Any:
        for part in (self.drafting, *self.judges, *self.by_kind.values(), self.best):
            said = part(question=question)
        return said


class MakesItsOwn(dspy.Module):
    def forward(self, question: str) -> Any:
        return dspy.Predict(BasicQA)(question=question)


class AsksItsModel(dspy.Module):
    def forward(self, question: str) -> Any:
        return dspy.Prediction(answer=dspy.settings.lm(question)[0])


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda: dspy.Predict(QA), ["Predict"]),
        (lambda: dspy.Predict(BasicQA), ["BasicQA"]),
        (lambda: dspy.ChainOfThought(QA), ["ChainOfThought"]),
        (lambda: dspy.ChainOfThought(BasicQA), ["ChainOfThought"]),
        (lambda: Predictor(QA), ["Predictor"]),
        (lambda: dspy.ReAct(BasicQA, []), ["BasicQA", "BasicQA"]),
        (Pair, ["writer", "checker"]),
        (
            Outer,
            [
                "drafting/writer",
                "drafting/checker",
                "judges.0",
                "judges.1",
                "by_kind.a.b",
                "best/writer",
                "best/checker",
            ],
        ),
        (MakesItsOwn, ["BasicQA"]),
        (AsksItsModel, ["AsksItsModel"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else None,
)
def test_a_module_has_the_name_of_its_attribute_or_of_its_signature_or_its_class(
    session: ActiveAttempt, server: ChatServer, program: Callable[[], dspy.Module], expected: list[str]
) -> None:
    program()(question="hi")
    assert paths(server) == expected


async def test_the_names_are_the_same_in_an_async_program(session: ActiveAttempt, server: ChatServer) -> None:
    class Async(Pair):
        async def aforward(self, question: str) -> Any:
            return await self.checker.acall(question=(await self.writer.acall(question=question)).answer)

    await Async().acall(question="hi")
    await dspy.asyncify(Pair())(question="hi")
    await dspy.settings.lm.aclose()
    assert paths(server) == ["writer", "checker"] * 2


def test_a_copy_of_a_program_has_the_names_of_the_program(session: ActiveAttempt, server: ChatServer) -> None:
    Pair().deepcopy()(question="hi")
    assert paths(server) == ["writer", "checker"]


def test_a_component_stands_around_a_program(session: ActiveAttempt, server: ChatServer) -> None:
    with lightning.component("team"):
        Pair()(question="hi")
    assert paths(server) == ["team/writer", "team/checker"]


def test_threads_of_dspy_know_the_program(session: ActiveAttempt, server: ChatServer) -> None:
    class Many(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, questions: list[str]) -> Any:
            examples = [dspy.Example(question=each).with_inputs("question") for each in questions]
            return self.pair.batch(examples, num_threads=2, disable_progress_bar=True)

    Many()(questions=["a", "b", "c"])
    assert sorted(paths(server)) == ["pair/checker"] * 3 + ["pair/writer"] * 3


def test_rollouts_beside_one_another_keep_their_names_and_tools(server: ChatServer) -> None:
    def shout(text: str) -> str:
        return text.upper()

    class Solves(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.solver = dspy.ReAct(QA, [shout])

        def forward(self, question: str) -> Any:
            return self.solver(question=question)

    server.answer = uses(("shout", {"text": "a"}))
    sessions: dict[str, ActiveAttempt] = {}
    program, together = Solves(), threading.Barrier(3)

    def rollout(key: str) -> None:
        llm = server.llm(key)
        with (
            activate(llm) as session,
            dspy.context(lm=dspy.LM("openai/policy", api_base=llm.base_url, api_key=key, cache=False)),
        ):
            together.wait()
            program(question=key)
        sessions[key] = session

    undo = [install_tap(), plugins().install_adapters(emit, ["dspy"])]
    threads = [threading.Thread(target=rollout, args=[key]) for key in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in undo:
        each()
    assert sorted({(call.rollout, call.key) for call in server.calls}) == [
        (key, key) for key in ("one", "three", "two")
    ]
    assert paths(server) == ["solver"] * 9
    assert [[event.name for event in session.tool_events] for session in sessions.values()] == [["shout"]] * 3


# tools ------------------------------------------------------------------------------------------------------------------
def test_tools_are_reported_with_their_outcome_and_how_a_loop_ends_is_none(
    session: ActiveAttempt, server: ChatServer
) -> None:
    def shout(text: str) -> str:
        if text == "bad":
            raise ValueError("bad text")
        return text.upper()

    server.answer = uses(("shout", {"text": "bad"}), ("shout", {"words": "a"}), ("shout", {"text": "a"}))
    dspy.ReAct(BasicQA, [shout])(question="hi")
    failed, misused, worked = session.tool_events
    assert (failed.status, failed.error, failed.arguments) == ("error", "ValueError('bad text')", {"text": "bad"})
    assert (misused.status, "words" in misused.error) == ("error", True)
    assert (worked.status, worked.output, worked.caller) == ("ok", "A", failed.caller)
    assert worked.caller is not None
    assert worked.caller.path == ("BasicQA",)


def test_a_tool_that_runs_a_program_stands_in_its_path(session: ActiveAttempt, server: ChatServer) -> None:
    callers: list[Caller | None] = []

    def research(topic: str) -> str:
        callers.append(current_caller())
        dspy.settings.lm(topic)
        return str(Pair()(question=topic).answer)

    server.answer = uses(("research", {"topic": "a"}))
    dspy.ReAct(BasicQA, [research])(question="hi")
    assert paths(server) == [
        "BasicQA", "BasicQA/research", "BasicQA/research/writer", "BasicQA/research/checker", "BasicQA", "BasicQA",
    ]  # fmt: skip
    (inside,) = callers
    assert inside is not None
    assert (inside.agent, inside.span_id) == ("research", "")
    assert [(event.name, event.status) for event in session.tool_events] == [("research", "ok")]


async def test_async_tools_are_reported(session: ActiveAttempt, server: ChatServer) -> None:
    async def shout(text: str) -> str:
        return text.upper()

    server.answer = uses(("shout", {"text": "a"}))
    await dspy.ReAct(BasicQA, [shout]).acall(question="hi")
    await dspy.settings.lm.aclose()
    assert [(event.name, event.status, event.output) for event in session.tool_events] == [("shout", "ok", "A")]


def test_a_tool_that_no_module_uses_is_not_reported(session: ActiveAttempt) -> None:
    assert dspy.Tool(lambda: "a", name="shout")() == "a"
    assert session.tool_events == ()


def test_no_frame_of_ours_stands_in_what_the_model_reads_of_an_error(
    session: ActiveAttempt, server: ChatServer
) -> None:
    def research(topic: str) -> str:
        try:
            inner(question=topic)
        except RuntimeError as error:
            raise ValueError("no answer") from error
        return ""

    class Fails(dspy.Module):
        def forward(self, question: str) -> Any:
            raise RuntimeError("broken")

    inner = Fails()
    server.answer = uses(("research", {"topic": "a"}))
    dspy.ReAct(BasicQA, [research])(question="hi")
    observation = server.calls[1].text
    assert "no answer" in observation
    assert "broken" in observation
    assert "lightning" not in observation


# the cache --------------------------------------------------------------------------------------------------------------
@pytest.fixture
def fresh_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dspy, "cache", Cache(enable_disk_cache=False, enable_memory_cache=True, disk_cache_dir=None))
    _warn_of_cache.cache_clear()


def test_an_answer_from_the_cache_is_said_once_with_its_cure(
    session: ActiveAttempt, server: ChatServer, fresh_cache: None, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(lm(server, cache=True)) as model, dspy.context(lm=model):
        for _ in range(3):
            dspy.Predict(QA)(question="hi")
    assert len(server.calls) == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "neither" not in warning
    assert "cache=False" in warning


def test_without_a_rollout_or_a_cached_answer_nothing_is_said(
    server: ChatServer, fresh_cache: None, caplog: pytest.LogCaptureFixture
) -> None:
    undo = plugins().install_adapters(emit, ["dspy"])
    with contextlib.closing(lm(server, cache=True)) as model, dspy.context(lm=model):
        for _ in range(2):
            dspy.Predict(QA)(question="hi")
        with activate(server.llm()):
            dspy.Predict(QA)(question="another")
    undo()
    assert len(server.calls) == 2
    assert caplog.records == []


# around it --------------------------------------------------------------------------------------------------------------
def test_a_reward_follows_a_call_of_dspys_own_client(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[tuple[str, str]]] = []

    def stream(transport: object, request: TransportRequest) -> Any:
        sent.append(request.headers)
        return SimpleNamespace(status=200, headers=[("X-Request-Id", "call-1")])

    monkeypatch.setattr(StdlibTransport, "stream", stream)
    undo = plugins().install_adapters(emit, ["dspy"])
    ours, elsewhere = (
        TransportRequest("POST", f"{url}/chat/completions", [("Authorization", "Bearer test-key")])
        for url in (server.llm().base_url, "http://127.0.0.1:1/v1")
    )
    with activate(server.llm()) as session:
        for request in (ours, elsewhere):
            StdlibTransport().stream(request)
        lightning.reward(1.0)
    undo()
    assert ("x-lightning-rollout", "test-key") in sent[0]
    assert sent[1] == ours.headers == [("Authorization", "Bearer test-key")]
    assert session.step_rewards[0].response_id == "call-1"


def test_the_undo_puts_the_methods_back() -> None:
    places = [
        (dspy.Module, "__call__"), (dspy.BaseLM, "acall"), (dspy.Tool, "__call__"), (Cache, "get"),
        (react, "format_error_for_lm"), (StdlibTransport, "stream"),
    ]  # fmt: skip
    before = [vars(owner)[name] for owner, name in places]
    first = lightning_dspy.adapter.lightning_install(lambda event: None)
    second = lightning_dspy.adapter.lightning_install(lambda event: None)
    first()
    assert all(vars(owner)[name] is not was for (owner, name), was in zip(places, before, strict=True))
    second()
    assert [vars(owner)[name] for owner, name in places] == before


@pytest.mark.parametrize("version", ["3.3.9", "3.5.0"])
def test_other_versions_are_refused_with_the_cure(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(PluginError, match=r"pip install 'dspy>=3.4,<3.5'"):
        lightning_dspy.adapter.lightning_install(lambda event: None)


def test_an_answer_without_its_fields_is_a_fault_of_the_policys(session: ActiveAttempt, server: ChatServer) -> None:
    server.answer = lambda call: "I would rather not."
    with pytest.raises(AdapterParseError) as raised:
        dspy.Predict("question -> answer, score: int")(question="hi")
    overflow = ContextWindowExceededError(message="too long")
    found = [lightning_dspy.adapter.lightning_policy_fault(error) for error in (raised.value, overflow, ValueError())]
    assert found == ["malformed_output", "context_overflow", None]
    assert set(paths(server)) == {"Predict"}
