"""DSPy's modules under the adapters' conformance kit."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import dspy
from dspy.utils.callback import BaseCallback
from lightning.testing import AdapterContract, Reply, ReplyFormat
from lightning.testing.contract_script import PARAMETERS, ScriptTurn, text_of
from lightning.types import LLM
from lightning_dspy.methods import replaced

QUESTION = re.compile(r"\[\[ ## question ## \]\]\n(.*?)\n\n", re.DOTALL)
FIELD = re.compile(r"`\[\[ ## (\w+) ## \]\]`")


def calculator(expression: str) -> str:
    """Evaluate a product."""
    if expression == "bad":
        raise ValueError("bad expression")
    left, right = expression.split("*")
    return str(int(left) * int(right))


class Fields(ReplyFormat):
    """DSPy's `ChatAdapter`: everything stands in fields of texts. A `ReAct` says that it is finished before it answers."""

    answering_calls = 2

    def read(self, body: Mapping[str, Any]) -> ScriptTurn:
        said = text_of(body["messages"][-1])
        question = QUESTION.search(said)
        assert question is not None
        return super().read(body)._replace(text=question[1], results=said.count("[[ ## observation_"))

    def calls(self, body: Mapping[str, Any], wanted: Mapping[str, str]) -> Reply:
        name, text = next(iter(wanted.items()))
        return self._tool(name, {PARAMETERS.get(name, "text"): text})

    def answer(self, body: Mapping[str, Any], text: str) -> Reply:
        fields = FIELD.findall(text_of(body["messages"][-1]))
        if "next_tool_name" in fields:
            return self._tool("finish", {})
        return self._filled({name: text for name in fields if name != "completed"})

    def _tool(self, name: str, arguments: Mapping[str, str]) -> Reply:
        thought = {"next_thought": "I use a tool.", "next_tool_name": name, "next_tool_args": json.dumps(arguments)}
        return self._filled(thought)

    def _filled(self, fields: Mapping[str, str]) -> Reply:
        return Reply(
            "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in fields.items()) + "[[ ## completed ## ]]"
        )


def lm(llm: LLM, dialect: str = "chat") -> dspy.LM:
    provider, kind = ("anthropic", "chat") if dialect == "messages" else ("openai", dialect)
    return dspy.LM(f"{provider}/{llm.model}", kind, api_base=llm.base_url, api_key=llm.api_key, cache=False)


def signature(name: str) -> Any:
    return dspy.Signature("question -> answer", f"You are {name}.")


class Program(dspy.Module):
    """Modules that are run one after the other, each with what the one before it said."""

    def __init__(self, lm: dspy.LM, names: tuple[str, ...], **modules: dspy.Module) -> None:
        super().__init__()
        self.lm, self.names = lm, names
        vars(self).update(modules)

    def forward(self, question: str) -> Any:
        for name in self.names:
            said = getattr(self, name)(question=question)
            question = said.answer
        return said

    async def aforward(self, question: str) -> Any:
        for name in self.names:
            said = await getattr(self, name).acall(question=question)
            question = said.answer
        return said


class Seen(BaseCallback):
    """The user's own callback."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_module_end(self, call_id: str, outputs: object, exception: BaseException | None = None) -> None:
        self.seen.append(outputs)

    on_tool_end = on_lm_end = on_module_end


class TestDSPy(AdapterContract):
    adapter = "dspy"
    capabilities = frozenset(
        {"tools", "cancel", "stream", "pair", "nested", "spans", "threads", "responses", "messages", "own_processor"}
    )
    replies = Fields()
    of_the_user: ClassVar[tuple[BaseCallback, ...]] = ()

    def solver(self, llm: LLM, dialect: str = "chat") -> Program:
        return Program(lm(llm, dialect), ("solver",), solver=dspy.ReAct(signature("solver"), [calculator]))

    def pair(self, llm: LLM) -> Program:
        parts = {name: dspy.Predict(signature(name)) for name in ("writer", "checker")}
        return Program(lm(llm), ("writer", "checker"), **parts)

    def boss(self, llm: LLM) -> Program:
        async def ask_math(text: str) -> str:
            return str((await program.solver.acall(question=text)).answer)

        async def ask_echo(text: str) -> str:
            return str((await program.echo.acall(question=text)).answer)

        boss = dspy.ReAct(signature("boss"), [ask_math, ask_echo])
        solver = dspy.ReAct(signature("solver"), [calculator])
        program = Program(lm(llm), ("boss",), boss=boss, solver=solver, echo=dspy.ChainOfThought(signature("echo")))
        return program

    async def run(self, agent: Any, text: str, *, stream: bool = False) -> str:
        async with contextlib.AsyncExitStack() as after:
            after.push_async_callback(agent.lm.aclose)
            after.enter_context(dspy.context(lm=agent.lm, callbacks=list(self.of_the_user)))
            if not stream:
                return str((await agent.acall(question=text)).answer)
            parts = [part async for part in dspy.streamify(agent, is_async_program=True)(question=text)]
            assert len(parts) > 1
            return str(parts[-1].answer)

    def run_sync(self, agent: Any, text: str) -> str:
        with dspy.context(lm=agent.lm), contextlib.closing(agent.lm):
            return str(agent(question=text).answer)

    @contextlib.contextmanager
    def own_processor(self) -> Iterator[list[object]]:
        listener = Seen()
        type(self).of_the_user = (listener,)
        try:
            yield listener.seen
        finally:
            type(self).of_the_user = ()

    def leftovers(self) -> object:
        return len(replaced)
