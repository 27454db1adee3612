"""What a dry run complains about."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
from lightning import reward
from lightning.terminal import Terminal
from lightning.testing.fake_vllm import Reply
from lightning.trainer.summary import Reporter
from lightning.types import Caller, CallStatus, Task, Transition, logprobs, token_ids
from lightning_debug.dev import DevReport, DevRow, _hints, _problems, dry_run, equal_rewards, said_of_rules, show
from lightning_debug.diagnosis import Attempted
from lightning_harnesses.config import RuleConfig
from lightning_policies.config import PolicyConfig

from tests.core.cli.test_output import EVIL, SHOWN, STEERS


def row(**seen: object) -> DevRow:
    fields = {"task": "t", "reward": 1.0, "error": "", "seconds": 1.0, "agents": {"writer": 2}, "tools": {}}
    calls = [
        Transition("r", 1, seq, "c", token_ids(), token_ids(), logprobs(), caller)
        for seq, caller in enumerate(seen.get("callers", ()))  # type: ignore[arg-type, var-annotated]
    ]
    fields["recorded"] = Attempted(calls, ())
    counts = {"trained_calls": 2, "prompt_tokens": 9, "response_tokens": 9, "calls_without_logprobs": 0}
    return DevRow(**{**fields, **counts, **seen})


def test_a_failed_adapter_is_a_problem_and_is_named_once() -> None:
    assert _problems([row()], ["*"]) == []
    (problem,) = _problems([row(failed_adapters=("acme",)), row(failed_adapters=("acme",))], ["*"])
    assert problem.startswith("the adapter acme failed")


def test_what_was_refused_is_a_problem_also_where_the_agent_went_on() -> None:
    no = Transition(
        "r", 1, 0, "c", token_ids(), token_ids(), logprobs(), status=CallStatus.REFUSED, error="no", finish_reason="x"
    )
    asked = replace(no, status=CallStatus.OK, tool_calls=("t",))
    seen = row(recorded=Attempted([no, asked], ()))
    assert _problems([seen, seen], ["*"]) == ["agent: 2 refused calls (x): no"]
    (hint,) = _hints([seen])
    assert hint.startswith("the model asked for 1 tool run,")


def test_untrained_calls_are_counted_and_a_rule_without_a_call_is_named() -> None:
    made = Transition("r", 1, 0, "c", token_ids(), token_ids(), logprobs(), WRITER, requested_model="m")
    calls = [replace(made, untrained="title"), replace(made, seq=1, extras={"harnesses": b"compaction"})]
    rules = {
        "title": RuleConfig(),
        "compaction": RuleConfig(),
        "judge": RuleConfig(agents=("judge",)),
        "writer": RuleConfig(agents=("writer",), train=True),
    }
    counted, missed = said_of_rules([row(recorded=Attempted(calls, ()))], rules)
    assert counted == "calls that are recorded and not trained: 1 title"
    assert missed.startswith("the rule untrained.judge matched no call: all its conditions must hold")
    assert missed.endswith("Agents seen: agent/writer. Models that were asked for: m")
    marked = row(trained_calls=0, callers=(WRITER,), recorded=Attempted(calls[:1], ()))
    assert _problems([marked], [])[0].startswith("the calls that could be trained are marked as untrained (1 title)")
    assert list(said_of_rules([row()], {})) == []


def test_calls_under_a_mask_are_hinted_at_and_stop_nothing() -> None:
    assert _hints([row()]) == []
    (hint,) = _hints([row(constrained_calls=2), row()])
    assert hint.startswith("2 of 4 trained calls were sampled with penalties, or under a mask")
    assert _problems([row(constrained_calls=2)], ["*"]) == []


WRITER, ASK = Caller("writer", ("agent", "writer")), Caller("ask", ("agent", "planner", "ask"))


def test_each_glob_that_was_meant_for_another_agent_is_a_problem() -> None:
    seen = row(callers=(WRITER, ASK))
    (problem,) = _problems([seen], ["writer", "planner"])
    assert problem.startswith("no call matched 'planner' of train_agents; did you mean '*/planner/*'?")
    assert "agent/planner/ask, agent/writer" in problem
    assert _problems([seen], ["writer", "*/planner/*"]) == []


def test_a_glob_that_matches_nothing_and_resembles_nothing_is_a_hint() -> None:
    seen = row(callers=(WRITER, ASK))
    assert _problems([seen], ["writer", "rescuer"]) == [], "it may be called now and then"
    (hint,) = _hints([seen], ["writer", "rescuer"])
    assert hint.startswith("no call matched 'rescuer' of train_agents; is it misspelt,")


def test_a_glob_of_a_policy_that_matches_nothing_is_a_problem_or_a_hint() -> None:
    seen, policies = row(callers=(WRITER, ASK)), {"plans": PolicyConfig(agents=("planner", "rescuer"))}
    (problem,) = _problems([seen], ["!policy:base"], policies)
    assert problem.startswith("no call matched 'planner' of policies.plans.agents; did you mean '*/planner/*'?")
    (hint,) = _hints([seen], ["!policy:base"], policies)
    assert hint.startswith("no call matched 'rescuer' of policies.plans.agents; is it misspelt,")


def test_when_nothing_is_trained_the_callers_are_named() -> None:
    (problem,) = _problems([row(trained_calls=0, callers=(ASK,))], ["planner"])
    assert problem.startswith("train_agents ['planner'] matches none of the agents seen: agent/planner/ask")
    (problem,) = _problems([row(trained_calls=0, callers=(ASK,))], ["!policy:judge", "!policy:base"])
    assert problem == "no call of agent/planner/ask has tokens to train on and a policy that is trained"
    (problem,) = _problems([row(trained_calls=0)], [])
    assert problem.startswith("no model call was recorded")


def test_greedy_calls_are_a_problem_where_rollouts_are_compared() -> None:
    (problem,) = _problems([row(greedy_calls=2)], ["*"])
    assert problem.startswith("2 of 2 trained calls were sampled at temperature 0")
    assert "gateway.override_sampling.temperature=1" in problem
    assert _problems([row(greedy_calls=2)], ["*"], compared=False) == []
    assert _problems([row(greedy_calls=1)], ["*"]) == []


def test_calls_with_media_are_a_hint_and_a_problem_where_nothing_is_left() -> None:
    (hint,) = _hints([row(media_calls=1)])
    assert hint.startswith("1 of 3 calls of trained agents are not trained: their prompts have an image")
    assert not _problems([row(media_calls=1)], ())
    (problem,) = _problems([row(media_calls=2, trained_calls=0)], ())
    assert problem.startswith("2 of 2 calls of trained agents are not trained")


def test_many_answers_that_were_cut_off_are_hinted_at() -> None:
    assert _hints([row(trained_calls=10, truncated_calls=2)]) == []
    (hint,) = _hints([row(trained_calls=10, truncated_calls=3)])
    assert hint.startswith("3 of 10 trained calls were cut off")
    assert "policy_server.max_model_len" in hint


def test_a_prompt_that_was_too_long_names_the_setting() -> None:
    error = "BadRequestError: Error code: 400 - This model's maximum context length is 2048 tokens."
    (problem,) = _problems([row(reward=None, error=error)], [])
    assert "policy_server.max_model_len" in problem


async def test_a_dry_run_tells_of_tools_that_the_model_is_not_shown_and_of_calls_that_do_not_fit(
    bench: Any, tmp_path: Path
) -> None:
    function = {"name": "add", "parameters": {"type": "object", "properties": {}}}

    async def with_tools(task: Task, llm: Any) -> float:
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "tools": [{"type": "function", "function": function}],
        }
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
            for more in ({}, {"max_tokens": 10**6}):
                async with session.post(f"{llm.base_url}/chat/completions", json=body | more) as reply:
                    assert reply.status == 200
            body["messages"][0]["content"] = "word " * 200_000
            async with session.post(f"{llm.base_url}/chat/completions", json=body) as reply:
                assert reply.status == 400
        return 1.0

    async with bench(tmp_path, with_tools) as made:
        made.loop.stack.servers[0].fake.shows_tools = False
        report = await dry_run(made.loop.stack, [Task("one")], [], made.loop.schedule.at(1), Reporter(enabled=False))
    (problem,) = report.problems
    assert problem.startswith("2 calls: the model's chat template does not show the tools")
    hint, clamped = report.hints
    assert hint.startswith("1 call was refused, since prompt and answer together are longer than the context")
    assert clamped.startswith("1 call asked for more tokens (up to 1000000) than")


async def test_a_dry_run_is_not_green_when_calls_are_refused_and_the_agent_goes_on(bench: Any, tmp_path: Path) -> None:
    async def swallows(task: Task, llm: Any) -> float:
        body = {"model": llm.model, "messages": [{"role": "user", "content": "Hello"}]}
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
            for more in ({"temperature": "hot"}, {} if task.input == "one" else {"n": 0}):
                async with session.post(f"{llm.base_url}/chat/completions", json=body | more) as reply:
                    await reply.read()
        return 1.0

    async with bench(tmp_path, swallows) as made:
        tasks, algorithm = [Task("one"), Task("none")], made.loop.schedule.at(1)
        report = await dry_run(made.loop.stack, tasks, [], algorithm, Reporter(enabled=False))
    assert not report.ok
    failed, *refused = report.problems
    assert "none of its model calls came to an end" in failed
    assert "2 of 2 were refused; the first: 'temperature' must be a number or null, not 'hot'." in failed
    assert (
        refused[0]
        == "swallows: 2 refused calls (invalid_parameter): 'temperature' must be a number or null, not 'hot'."
    )
    assert len(refused) == 2


async def test_a_dry_run_shows_the_parts_of_a_reward_and_what_each_call_was_given(bench: Any, tmp_path: Path) -> None:
    async def judged(task: Task, llm: Any) -> dict[str, float]:
        body = {"model": llm.model, "messages": [{"role": "user", "content": "Hello"}]}
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
            for value in (0.25, 0.75):
                async with session.post(f"{llm.base_url}/chat/completions", json=body) as reply:
                    await reply.read()
                reward(value, name="[polite]")
        return {"right": 0.5, "form": 0.25}

    console = Terminal(width=200, file=io.StringIO())
    async with bench(tmp_path, judged) as made:
        report = await dry_run(
            made.loop.stack, [Task("one")], [], made.loop.schedule.at(1), Reporter(enabled=True, console=console)
        )
    (row,) = report.rows
    assert row.call_rewards == ("call 1 (judged): [polite] 0.25", "call 2 (judged): [polite] 0.75")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.75 (right 0.5, form 0.25)" in shown
    assert "one: call 1 (judged): [polite] 0.25, call 2 (judged): [polite] 0.75" in shown


async def test_a_dry_run_samples_as_training_does_and_counts_what_it_sampled(bench: Any, tmp_path: Path) -> None:
    async def greedy(task: Task, llm: Any) -> float:
        body = {"model": llm.model, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
        headers = {"authorization": f"Bearer {llm.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{llm.base_url}/chat/completions", json=body) as reply,
        ):
            reply.raise_for_status()
        return 1.0

    settings: dict[str, Any] = {
        "trainer__eval_temperature": 1.0,
        "script": lambda body: Reply("x", finish_reason="length"),
    }
    async with bench(tmp_path, greedy, **settings) as made:
        report = await dry_run(
            made.loop.stack, [Task("one")], ["[a-z]*"], made.loop.schedule.at(1), Reporter(enabled=False)
        )
    (seen,) = report.rows
    assert (seen.greedy_calls, seen.constrained_calls, seen.truncated_calls) == (1, 0, 1)
    (problem,) = report.problems
    assert problem.startswith("1 of 1 trained calls were sampled at temperature 0")
    (hint,) = report.hints
    assert hint.startswith("1 of 1 trained calls were cut off")


async def test_a_memory_that_rollouts_share_is_a_problem(bench: Any, tmp_path: Path) -> None:
    """LangGraph's checkpointer at the top of a module, with a thread_id from the tutorial."""
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, MessagesState, StateGraph

    def compiled(checkpointer: Any, llm: Any, client: Any) -> Any:
        model = ChatOpenAI(
            base_url=llm.base_url, api_key=llm.api_key, model=llm.model, max_retries=0, http_async_client=client
        )

        async def chat(state: MessagesState) -> Any:
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("chat", chat)
        graph.add_edge(START, "chat")
        return graph.compile(checkpointer=checkpointer)

    memory = InMemorySaver()
    saved = {"shared": lambda task: memory, "own": lambda task: InMemorySaver()}

    def agent_with(kind: str) -> Any:
        async def agent(task: Task, llm: Any) -> float:
            async with httpx2.AsyncClient() as client:
                graph = compiled(saved[kind](task), llm, client)
                for text in (f"I am {task.input}.", "Who am I?"):
                    thread = {"configurable": {"thread_id": "1"}}
                    await graph.ainvoke({"messages": [("user", text)]}, thread)
            return 1.0

        return agent

    def answer(body: Any) -> Reply:
        return Reply(
            f"Nice to talk to you about that, and I hope that we go on like this for a while, as others do: "
            f"{body['messages'][-1]['content']} And you are number {len(str(body))}."
        )

    tasks = [Task("Ann"), Task("Bob"), Task("Cleo")]
    for kind in saved:
        async with bench(tmp_path / kind, agent_with(kind), script=answer) as made:
            report = await dry_run(made.loop.stack, tasks, [], made.loop.schedule.at(1), Reporter(enabled=False))
        shared = [problem for problem in report.problems if "rollouts share a memory" in problem]
        assert len(shared) == (kind == "shared"), report.problems
        if shared:
            assert shared[0].startswith("prompts of ")
            assert "InMemorySaver" not in shared[0]
            assert "thread_id" in shared[0]


def test_equal_rewards_are_not_approved() -> None:
    said = equal_rewards([row(reward=0.0)] * 4)
    assert said.startswith("All 4 rewards were 0. Training learns from differences")
    assert equal_rewards([row(reward=0.0), row(reward=0.5)]) == ""
    assert equal_rewards([row(reward=0.0), row(reward=None)]) == "", "one reward has no other beside it"
    out = io.StringIO()
    show(DevReport((row(),), (), (said,), rewards_differ=False), Terminal(file=out, width=1000))
    assert said in out.getvalue()
    assert "everything that training needs" not in out.getvalue()


def test_a_report_shows_a_glob_with_brackets_as_it_is() -> None:
    text = io.StringIO()
    show(DevReport((), ("train_agents ['[a-z]'] matches none",)), Terminal(file=text, width=200))
    assert "['[a-z]']" in text.getvalue()


def test_a_report_never_cuts_the_name_of_an_agent_or_a_tool() -> None:
    text = io.StringIO()
    seen = row(task="a long task " * 9, agents={"support/solve": 2, "support/check": 1}, tools={"calculator": 1})
    show(DevReport((seen,), ()), Terminal(file=text, width=80))
    assert all(name in text.getvalue() for name in ("support/solve (2)", "support/check (1)", "calculator (1)"))
    assert len(text.getvalue().splitlines()) <= 12  # the task is cut instead, to a few lines beside the names


def test_a_report_shows_names_that_agents_chose_and_obeys_none() -> None:
    console = Terminal(file=io.StringIO(), width=400)
    seen = DevRow(EVIL, 1.0, "", 1.0, {EVIL: 1}, {EVIL: 1}, 1, 1, 1, 0)
    show(DevReport((seen,), (EVIL,), (EVIL,)), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert STEERS.search(shown) is None
    assert shown.count(SHOWN) == 5
