"""smolagents' two kinds of agents under the adapters' conformance kit."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from lightning.testing import AdapterContract, Reply, ReplyFormat
from lightning.testing.contract_script import ScriptTurn, text_of
from lightning.types import LLM
from lightning_smolagents.methods import replaced
from smolagents import ActionStep, CodeAgent, FinalAnswerStep, LiteLLMModel, OpenAIModel, Tool, ToolCallingAgent, tool

# Of LiteLLM's types, in a stream.
pytestmark = pytest.mark.filterwarnings("ignore:Item .* on TypedDict:UserWarning")

RUN = "'type': 'function'"
"""In a message of the agent's own: a tool call, or code, that was run."""


@tool
def calculator(expression: str) -> str:
    """Evaluate a product.

    Args:
        expression: It.
    """
    if expression == "bad":
        raise ValueError("bad expression")
    left, right = expression.split("*")
    return str(int(left) * int(right))


class Ask(Tool):
    """A tool that holds an agent."""

    description = "Ask an agent."
    inputs: ClassVar[Any] = {"text": {"type": "string", "description": "What to ask."}}
    output_type = "string"

    def __init__(self, name: str, agent: ToolCallingAgent | CodeAgent) -> None:
        self.name, self.agent = name, agent
        super().__init__()

    def forward(self, text: str) -> str:
        return str(self.agent.run(text))


class Texts(ReplyFormat):
    """smolagents tells the model the results of its tools in the user's place."""

    def read(self, body: Mapping[str, Any]) -> ScriptTurn:
        said = {
            role: [text_of(item) for item in body["messages"] if item["role"] == role] for role in ("user", "assistant")
        }
        asked = super().read(body)
        return asked._replace(
            text=said["user"][0], results=self.results("".join(said["assistant"]), "".join(said["user"]))
        )

    def results(self, agent: str, user: str) -> int:
        """How many tool results there are in what the agent and the user's side have said."""
        return agent.count(RUN) + user.count("Error:\n")

    def answer(self, body: Mapping[str, Any], text: str) -> Reply:
        return self.calls(body, {"final_answer": text})


class Code(Texts):
    """A `CodeAgent`'s model writes Python."""

    def results(self, agent: str, user: str) -> int:
        return agent.count(RUN)

    def calls(self, body: Mapping[str, Any], wanted: Mapping[str, str]) -> Reply:
        name, text = next(iter(wanted.items()))
        return Reply(f"I use a tool.\n<code>\nresult = {name}({json.dumps(text)})\nprint(result)\n</code>")


@dataclass
class Runs:
    """Agents that are run one after the other, each with what the one before it said."""

    model: OpenAIModel | LiteLLMModel
    agents: list[ToolCallingAgent | CodeAgent]

    def run(self, text: str, stream: bool) -> str:
        with self.model.client if isinstance(self.model, OpenAIModel) else contextlib.nullcontext():
            return self._run(text, stream)

    def _run(self, text: str, stream: bool) -> str:
        for agent in self.agents:
            agent.stream_outputs = stream
            if stream:
                *_, last = agent.run(text, stream=True)
                assert isinstance(last, FinalAnswerStep)
                text = str(last.output)
            else:
                text = str(agent.run(text))
        return text


class TestToolCallingAgent(AdapterContract):
    adapter = "smolagents"
    capabilities = frozenset(
        {
            "tools",
            "tool_call_ids",
            "stream",
            "pair",
            "nested",
            "spans",
            "threads",
            "responses",
            "messages",
            "own_processor",
        }
    )
    replies = Texts()
    kind: ClassVar[type[ToolCallingAgent | CodeAgent]] = ToolCallingAgent
    of_the_user: ClassVar[tuple[Any, ...]] = ()

    def agent(self, name: str, model: OpenAIModel | LiteLLMModel, *tools: Tool) -> ToolCallingAgent | CodeAgent:
        callbacks = list(self.of_the_user)
        return self.kind(
            list(tools), model, name=name, instructions=f"You are {name}.", verbosity_level=-1, step_callbacks=callbacks
        )

    def model(self, llm: LLM, dialect: str = "chat") -> OpenAIModel | LiteLLMModel:
        match dialect:
            case "messages":
                url = llm.base_url.removesuffix("/v1")
                return LiteLLMModel(f"anthropic/{llm.model}", api_base=url, api_key=llm.api_key)
            case "responses":
                return LiteLLMModel(f"openai/responses/{llm.model}", api_base=llm.base_url, api_key=llm.api_key)
        return OpenAIModel(llm.model, api_base=llm.base_url, api_key=llm.api_key)

    def solver(self, llm: LLM, dialect: str = "chat") -> Runs:
        model = self.model(llm, dialect)
        return Runs(model, [self.agent("solver", model, calculator)])

    def pair(self, llm: LLM) -> Runs:
        model = self.model(llm)
        return Runs(model, [self.agent("writer", model), self.agent("checker", model)])

    def boss(self, llm: LLM) -> Runs:
        model = self.model(llm)
        tools = Ask("ask_math", self.agent("solver", model, calculator)), Ask("ask_echo", self.agent("echo", model))
        return Runs(model, [self.agent("boss", model, *tools)])

    async def run(self, agent: Any, text: str, *, stream: bool = False) -> str:
        return await asyncio.to_thread(agent.run, text, stream)

    def run_sync(self, agent: Any, text: str) -> str:
        return str(agent.run(text, False))

    @contextlib.contextmanager
    def own_processor(self) -> Iterator[list[object]]:
        seen: list[object] = []

        def see(step: ActionStep, agent: object) -> None:
            seen.append(step)

        type(self).of_the_user = (see,)
        try:
            yield seen
        finally:
            type(self).of_the_user = ()

    def leftovers(self) -> object:
        return len(replaced)


class TestCodeAgent(TestToolCallingAgent):
    capabilities = TestToolCallingAgent.capabilities - {"tool_call_ids"}
    replies = Code()
    kind = CodeAgent
