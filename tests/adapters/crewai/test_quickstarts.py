"""CrewAI's own first examples, as its documentation has them, as rollouts in worker processes: every call gets its name.

The clients find the policy in `OPENAI_BASE_URL`, where the process runner puts it.
"""

import asyncio
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.config import RunnerConfig
from lightning.testing import Reply, ToolCall
from lightning.types import LLM, Task

from tests.adapters.worker_rollouts import Left, run_in_worker

PROGRAMS = Path(__file__).parent / "programs"
TOOLS: Mapping[str, dict[str, str]] = {
    "Senior Data Researcher": {"search_the_internet_with_serper": '{"search_query": "agents"}'},
    "Content Writer": {
        "ask_question_to_coworker": (
            '{"question": "What is new?", "context": "An article.", "coworker": "Research Specialist"}'
        )
    },
}
"""What the model calls, by its instructions."""


def script(body: Mapping[str, Any]) -> Reply:
    """Call the next tool that has not been called; then answer with what the last one said."""
    said = str(body["messages"][0].get("content"))
    calls = [call["function"]["name"] for item in body["messages"] for call in item.get("tool_calls") or ()]
    tools = next(
        (tools for words, tools in TOOLS.items() if f"You are {words}" in said or f"Agents {words}" in said), {}
    )
    left = [ToolCall(name, arguments, f"call-{name}") for name, arguments in tools.items() if name not in calls]
    return Reply(tool_calls=left[:1]) if left else Reply(f"It is this: {body['messages'][-1].get('content')}")


def run_program(job: Task, llm: LLM) -> float:
    """Run the program that the task names, as the user does."""
    runpy.run_path(str(job.input), run_name="__main__")
    return 1.0


@pytest.fixture(scope="module")
def left() -> dict[str, Left]:
    config = RunnerConfig(concurrency=1, timeout=120, preload=("crewai",))
    names = [str(PROGRAMS / f"{name}.py") for name in ("latest_ai_flow", "example_flow", "collaboration")]
    found = asyncio.run(run_in_worker(run_program, names, script, config))
    return {Path(name).stem: left for name, left in found.items()}


@pytest.mark.parametrize(
    ("name", "paths", "tools"),
    [
        (
            "latest_ai_flow",
            ["LatestAiFlow/run_research/research_task/{topic} Senior Data Researcher"] * 2,
            ["search_the_internet_with_serper"],
        ),
        ("example_flow", ["ExampleFlow/generate_city", "ExampleFlow/generate_fun_fact"], []),
        (
            "collaboration",
            ["Content Writer", "Content Writer/ask_question_to_coworker/Research Specialist", "Content Writer"],
            ["ask_question_to_coworker"],
        ),
    ],
)
def test_quickstart(name: str, paths: list[str], tools: list[str], left: dict[str, Left]) -> None:
    assert left[name].paths("crewai") == paths
    assert [(event.name, event.status, event.call_id) for event in left[name].events] == [
        (each, "ok", f"call-{each}") for each in tools
    ]
