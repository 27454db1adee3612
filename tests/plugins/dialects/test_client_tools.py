"""Tools of the Responses API that the client runs: functions for the model, items of their own for the client; hosted tools."""

from __future__ import annotations

import json
import logging

import openai
import pytest
from lightning.testing.fake_vllm import Reply, ToolCall

from tests.core.gateway.test_responses import ask, chat_body

PATCH = {"type": "update_file", "path": "a.py", "diff": "@@\n-1\n+2"}
TOOLS = {
    "custom": {"type": "custom", "name": "sql", "description": "Runs SQL.", "format": {"type": "text"}},
    "local_shell": {"type": "local_shell"},
    "shell": {"type": "shell", "environment": {"type": "local"}},
    "apply_patch": {"type": "apply_patch"},
}
CALLED = {
    "custom": ("sql", {"input": "select 1"}, {"name": "sql", "input": "select 1"}),
    "local_shell": (
        "local_shell",
        {"command": ["ls", "-l"]},
        {"action": {"type": "exec", "env": {}, "command": ["ls", "-l"]}},
    ),
    "shell": ("shell", {"commands": ["ls"], "timeout_ms": 9}, {"action": {"commands": ["ls"], "timeout_ms": 9}}),
    "apply_patch": ("apply_patch", {"operation": PATCH}, {"operation": PATCH}),
}
OUTPUTS = {
    "custom": ("1", "1"),
    "local_shell": ("files", "files"),
    "shell": ([{"stdout": "a", "stderr": ""}], '[{"stdout": "a", "stderr": ""}]'),
    "apply_patch": (None, "completed"),
}


def plain(item: object) -> dict:
    return item.model_dump(exclude_none=True)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", list(TOOLS))
async def test_a_tool_of_the_client_is_a_function_for_the_model_and_its_own_item_for_the_client(house, kind, stream):
    name, arguments, expected = CALLED[kind]
    house.fake.queue(Reply(tool_calls=[ToolCall(name, json.dumps(arguments), id="call_x")]), Reply("done"))
    client = await house.client()
    first = await ask(client, stream, input="go", tools=[TOOLS[kind]])
    (item,) = first.output
    call = plain(item)
    assert item.type == ("custom_tool_call" if kind == "custom" else f"{kind}_call")
    assert call["call_id"] == "call_x"
    assert {key: call[key] for key in expected} == expected
    (function,) = chat_body(house)["tools"]
    assert function["function"]["name"] == name
    assert set(function["function"]["parameters"]["required"]) <= set(arguments)

    output, said = OUTPUTS[kind]
    result = {"type": f"{item.type}_output", "call_id": "call_x", "output": output, "status": "completed"}
    second = await ask(client, stream, input=[{"role": "user", "content": "go"}, call, result], tools=[TOOLS[kind]])
    assert second.output_text == "done"
    _, called, answered = chat_body(house)["messages"]
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == arguments
    assert answered == {"role": "tool", "content": said, "tool_call_id": "call_x"}


async def test_the_grammar_of_a_custom_tool_is_told_to_the_model(house):
    house.fake.queue(Reply("fine"))
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    await ask(await house.client(), False, input="go", tools=[{**TOOLS["custom"], "format": grammar}])
    said = chat_body(house)["tools"][0]["function"]["description"]
    assert said == 'Runs SQL.\n\nThe input follows this grammar (lark):\nstart: "a"'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ["rm -rf /", '{"commands": "rm -rf /"}', "[]"])
async def test_a_call_that_is_not_what_the_tool_takes_stays_a_function_that_nobody_runs(house, arguments, stream):
    house.fake.queue(Reply(tool_calls=[ToolCall("shell", arguments, id="call_x")]))
    said = await ask(await house.client(), stream, input="go", tools=[TOOLS["shell"]])
    (item,) = said.output
    assert (item.type, item.name, item.arguments) == ("function_call", "shell", arguments)


async def test_an_item_that_says_nothing_is_refused_by_its_place(house):
    with pytest.raises(openai.UnprocessableEntityError, match=r"input\[0\].action.*must be an object"):
        await ask(await house.client(), False, input=[{"type": "shell_call", "call_id": "x", "action": "ls"}])


HOSTED = [{"type": "web_search"}, {"type": "shell", "environment": {"type": "container_auto"}}, TOOLS["custom"]]


async def test_hosted_tools_are_refused_with_the_setting_that_drops_them(house):
    with pytest.raises(
        openai.UnprocessableEntityError, match=r"'web_search', which runs on OpenAI's servers.*hosted_tools"
    ):
        await ask(await house.client(), False, input="go", tools=HOSTED)


async def test_hosted_tools_are_dropped_where_that_is_asked_for_and_that_is_said_once(build, caplog):
    house = await build(hosted_tools="drop")
    house.fake.queue(Reply("one"), Reply("two"), Reply("three"))
    client = await house.client()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await ask(client, False, input="go", tools=HOSTED, tool_choice={"type": "web_search"})
    assert [tool["function"]["name"] for tool in chat_body(house)["tools"]] == ["sql"]
    assert "tool_choice" not in chat_body(house)
    assert caplog.text.count("agents ask for the tool 'web_search'") == 1
    body = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}
    answer = await client.post(
        "/messages", body={**body, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, cast_to=dict
    )
    assert answer["content"][0]["text"] == "three"
    assert not chat_body(house).get("tools")
