"""Programs in the shape of frameworks' documentation, as they are, through worker processes, gateway and store: those of the
list that need nothing installed (`make test-official` runs them all)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from lightning.types import Outcome, Transition

from tests.official import table
from tests.official.listing import load
from tests.official.suite import CONTEXT, Result, opened

pytestmark = pytest.mark.slow  # seven frameworks are imported

LISTING = load()
PINNED = [program for program in LISTING.programs if program.pinned]
Seen = Callable[[str], tuple[Sequence[Transition], Outcome]]


@pytest.fixture(scope="module")
def ran() -> tuple[dict[str, Result], Seen]:
    async def run() -> tuple[dict[str, Result], Seen]:
        async with opened(LISTING) as suite:
            results = {result.program: result async for result in suite.run(PINNED)}
        return results, suite.seen.__getitem__

    return asyncio.run(run())


@pytest.fixture
def seen(ran: tuple[dict[str, Result], Seen]) -> Seen:
    return ran[1]


@pytest.mark.parametrize("name", [program.name for program in PINNED])
def test_the_store_has_what_the_policy_server_said_under_the_names_of_the_list(
    ran: tuple[dict[str, Result], Seen], name: str
) -> None:
    result = ran[0][name]
    assert result.calls > 0
    assert result.problems == []


def test_the_page_was_written_from_this_list() -> None:
    """`make test-official` writes it anew."""
    assert table.PAGE.read_text(encoding="utf-8").endswith(table.programs_section(LISTING))


def test_chat_anthropic_asks_for_more_than_there_is_room_for(seen: Seen) -> None:
    calls, _ = seen("langchain/anthropic_workflow.py")
    assert [call.caller.agent for call in calls] == ["writer", "editor"]
    assert all(call.max_tokens_asked > CONTEXT for call in calls)


def test_retrieval_with_openais_embeddings(seen: Seen) -> None:
    """The embeddings are the provider's, and the answer the policy's: it is asked with what was found."""
    (call,), outcome = seen("langchain/rag_openai.py")
    assert (call.caller.agent, outcome.error) == ("rag", "")


def test_three_react_agents_under_a_supervisor_are_three_agents(seen: Seen) -> None:
    calls, outcome = seen("langgraph/supervisor_by_hand.py")
    workers = ("researcher", "mathematician", "writer")
    assert [call.caller.agent for call in calls if call.caller.agent != "supervisor"] == [
        name for name in workers for _ in "12"
    ]
    assert [event.caller.agent for event in outcome.tool_events if event.caller] == list(workers)


def test_threads_of_a_pool_belong_to_the_component_that_began_it(seen: Seen) -> None:
    calls, _ = seen("plain/thread_pool.py")
    assert [call.caller.path for call in calls] == [("reviewer",)] * 3 + [("summarizer",)]


def test_a_failure_of_an_mcp_server_is_one_and_equal_calls_at_once_keep_their_ids(seen: Seen) -> None:
    calls, outcome = seen("openai_agents/mcp_errors.py")
    status = {event.name: event.status for event in outcome.tool_events}
    assert (status["temperature"], status["humidity"]) == ("ok", "error")
    first, second = next(call.tool_calls for call in calls if call.caller.agent == "player" and call.tool_calls)
    throws = {event.output: event.call_id for event in outcome.tool_events if event.name == "throw_die"}
    assert throws == {"throw 1": first, "throw 2": second}, "the first to be asked for is the last to end"


def test_autogens_on_messages_has_a_name_and_tells_of_a_tool_once(seen: Seen) -> None:
    calls, outcome = seen("autogen/on_messages.py")
    assert {call.caller.agent for call in calls} == {"assistant"}
    assert [event.call_id for event in outcome.tool_events] == [call.tool_calls[0] for call in calls if call.tool_calls]


def test_opentelemetrys_api_without_its_sdk_marks_no_call(seen: Seen) -> None:
    calls, _ = seen("anthropic_sdk/opentelemetry_api_alone.py")
    assert [call.caller.agent for call in calls] == ["main", "main"]
