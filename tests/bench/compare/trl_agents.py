"""The demonstrations' agents as TRL's own tool loop can play them: prompt, tools, what is a call in a reply, and the grade.

The invariant: prompts, tools, limits and grades are the examples' own code, so both sides sample and score the same rollouts.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType

from autogen_core.models import AssistantMessage, UserMessage
from lightning.types import Task
from lightning_examples.calculator_autogen import agent as calculator
from lightning_examples.raw_python import agent as tiny
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import qwen3_template

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TrlAgent:
    """One agent in TRL's words. `reward` has the signature of TRL's reward functions; `prepare` teaches a tokenizer what a tool
    call is. `rollout_tokens` is more than all responses and tool results of a rollout ever need; `stop` are texts that end a
    reply, each at the end of some of the vocabulary's tokens."""

    prompt: Callable[[str], list[Message]]
    tools: Sequence[Callable[..., str]]
    reward: Callable[..., list[float]]
    prepare: Callable[[PreTrainedTokenizerBase], None]
    max_calls: int
    max_tokens: int
    rollout_tokens: int
    stop: str = ""


def agent_of(demo: str) -> TrlAgent:
    """The agent of a demonstration. Raises `KeyError` for one that was not written for TRL."""
    return {"tiny": _tiny, "calculator": _calculator}[demo]()


def _tiny() -> TrlAgent:
    """Plain Python on the tiny model, which calls tools as Qwen3 does."""

    def prepare(tokenizer: PreTrainedTokenizerBase) -> None:
        tokenizer.response_template = qwen3_template

    def reward(completions: Sequence[Sequence[Message]], expected: Sequence[int], **_: object) -> list[float]:
        # None for a rollout that ends in a tool call or its result.
        return [
            tiny.grade(str(last["content"] or ""), Task(input="", expected=answer))
            if last["role"] == "assistant" and not last.get("tool_calls")
            else 0.0
            for (*_, last), answer in zip(completions, expected, strict=True)
        ]

    return TrlAgent(
        prompt=lambda question: [{"role": "system", "content": tiny.SYSTEM}, {"role": "user", "content": question}],
        tools=[_as_tool(name) for name in tiny.FUNCTIONS],
        reward=reward,
        prepare=prepare,
        max_calls=tiny.MAX_CALLS,
        max_tokens=tiny.MAX_TOKENS,
        rollout_tokens=700,
    )


def _as_tool(name: str) -> Callable[..., str]:
    """One of the tiny agent's tools as `transformers` wants it: typed, with a docstring; errors are texts for the model."""
    function = tiny.FUNCTIONS[name]
    schema = next(tool["function"] for tool in tiny.TOOLS if tool["function"]["name"] == name)

    @functools.wraps(function)
    def tool(**arguments: object) -> str:
        return tiny.run_tool(name, json.dumps(arguments))

    described = [f"    {parameter}: Its {parameter}." for parameter in inspect.signature(function).parameters]
    tool.__doc__ = "\n".join([str(schema["description"]), *(["", "Args:", *described] if described else [])])
    return tool


# ChatML as SmolLM2's own template writes it, but that a tool's result is what the user says. TRL wants to see calls in an
# assistant's message without content, which this agent never writes.
_TEXT_TOOLS = (
    "{% for message in messages %}{{ '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' }}"
    "{{ message.content or (message.tool_calls | tojson if message.tool_calls else '') }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _calculator() -> TrlAgent:
    """The calculator agent on SmolLM2: each reply is one line, a calculation or the answer."""

    def calculate(expression: str) -> str:
        """The value of an arithmetic expression.

        Args:
            expression: What to calculate.
        """
        return calculator.calculate(expression)

    def parse(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], **_: object) -> dict[str, object]:
        said = str(tokenizer.decode(ids, skip_special_tokens=True))
        line = said.strip()
        message: dict[str, object] = {"role": "assistant", "content": said}
        if not calculator.ANSWER.fullmatch(line) and _calculates(line):
            function = {"name": "calculate", "arguments": {"expression": line}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message

    def prepare(tokenizer: PreTrainedTokenizerBase) -> None:
        tokenizer.chat_template = _TEXT_TOOLS
        tokenizer.response_template = {"defaults": {"role": "assistant"}}
        tokenizer.parse_response = MethodType(parse, tokenizer)

    def reward(completions: Sequence[Sequence[Message]], expected: Sequence[float], **_: object) -> list[float]:
        return [
            calculator.grade(str(messages[-1]["content"]).strip(), answer, calculated=len(messages) > 1)["reward"]
            for messages, answer in zip(completions, expected, strict=True)
        ]

    return TrlAgent(
        prompt=_shown,
        tools=[calculate],
        reward=reward,
        prepare=prepare,
        max_calls=calculator.MAX_TURNS,
        max_tokens=calculator.MAX_TOKENS,
        rollout_tokens=256,
        stop="\n",
    )


_ROLES = {UserMessage: "user", AssistantMessage: "assistant"}


def _shown(question: str) -> list[Message]:
    """The agent's prompt: its instruction, the worked examples, the question."""
    shown = [{"role": _ROLES[type(said)], "content": said.content} for said in calculator.worked_examples()]
    return [{"role": "system", "content": calculator.SYSTEM}, *shown, {"role": "user", "content": question}]


def _calculates(line: str) -> bool:
    """Whether the calculator has a result for it; the agent gives up otherwise."""
    try:
        calculator.calculate(line)
    except ValueError:
        return False
    return True
