"""Streams and whole answers of the translated dialects say the same, however vLLM cuts its answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.gateway.http import EventCutter, RefusalError, data_of
from lightning_dialects.messages import MessageTranslator
from lightning_dialects.responses import ResponseTranslator, ToolNames

TEXTS = st.text(max_size=12)
ARGUMENTS = st.dictionaries(st.text(max_size=4), st.none() | st.integers() | st.text(max_size=6), max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "space__find"]), ARGUMENTS), max_size=3)
FINISHES = st.sampled_from(["stop", "length", "tool_calls"])
STOPS = st.sampled_from([None, 7, "\n"])


def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """The text cut anywhere; never empty pieces, which vLLM does not send either."""
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=4)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [part for part in parts if part]


@st.composite
def answers(draw: st.DrawFn) -> tuple[dict, list[dict]]:
    """A whole chat answer, and the chunks of a stream of the same content."""
    thought, text, calls = draw(TEXTS), draw(TEXTS), draw(CALLS)
    finish, stop = draw(FINISHES), draw(STOPS)
    deltas: list[dict] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": piece} for piece in pieces(draw, thought)]
    deltas += [{"content": piece} for piece in pieces(draw, text)]
    said: list[dict] = []
    for number, (name, arguments) in enumerate(calls):
        whole = json.dumps(arguments)
        function = {"name": name, "arguments": whole}
        said.append({"id": f"call_{number}", "type": "function", "function": function})
        first, *rest = ["", *pieces(draw, whole)]
        begin = {"id": f"call_{number}", "type": "function", "index": number, "function": {"name": name}}
        if draw(st.booleans()):  # a parser may send the first arguments with the name
            first, *rest = rest
            begin["function"]["arguments"] = first
        deltas.append({"tool_calls": [begin]})
        deltas += [{"tool_calls": [{"index": number, "function": {"arguments": piece}}]} for piece in rest]
        # Between calls vLLM streams what stands there, and strips it from whole answers.
        deltas += [{"content": blank} for blank in draw(st.lists(st.sampled_from(["\n", " "]), max_size=2))]
    entries = [
        {"token": str(number), "logprob": -0.5, "bytes": [1], "top_logprobs": []} for number in range(len(deltas))
    ]
    frame = {"id": "chatcmpl-1", "created": 5, "model": "tiny"}
    usage = {"prompt_tokens": 3, "completion_tokens": len(deltas), "total_tokens": 3 + len(deltas)}
    chunks = [
        {**frame, "choices": [{"index": 0, "delta": delta, "logprobs": {"content": [entry]}, "finish_reason": None}]}
        for delta, entry in zip(deltas, entries, strict=True)
    ]
    chunks[0]["prompt_token_ids"] = [1, 2, 3]
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish, "stop_reason": stop}
    chunks += [{**frame, "choices": [last]}, {**frame, "choices": [], "usage": usage}]
    message = {"role": "assistant", "content": text or None, "reasoning": thought or None, "tool_calls": said}
    choice = {**last, "message": message, "logprobs": {"content": entries}}
    return {**frame, "choices": [choice], "usage": usage}, chunks


def events_of(payload: bytes) -> list[dict]:
    cutter = EventCutter()
    events = [json.loads(data_of(event)) for event in cutter.feed(payload)]
    assert not cutter.rest()
    return events


def response_translator() -> ResponseTranslator:
    names = {"space__find": ("space", "find")}
    return ResponseTranslator("resp_1", {"input": "x"}, {"logprobs": True}, ToolNames(names, {}), ())


def without_logprobs(item: dict) -> dict:
    """An item that is done while the answer goes on has the logprobs up to there."""
    content = [{**part, "logprobs": []} for part in item.get("content", ())]
    return {**item, "content": content}


@given(answers())
def test_a_streamed_response_is_the_whole_one(answer):
    whole, chunks = answer
    expected = response_translator().whole(whole)
    translator = response_translator()
    before = events_of(b"".join(map(translator.chunk, chunks)))
    after = events_of(translator.end())
    events = [*before, *after]
    assert events[-1]["response"] == expected
    assert events[-1]["type"] == f"response.{expected['status']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert not [event for event in before if event["type"] in {"response.completed", "response.incomplete"}]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [without_logprobs(event["item"]) for event in done] == [
        without_logprobs(item) for item in expected["output"]
    ]
    assert [event["output_index"] for event in done] == list(range(len(done)))
    for item in expected["output"]:
        pieces = [event["delta"] for event in events if event.get("item_id") == item["id"] and "delta" in event]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(pieces) == said


def test_an_answer_that_was_cut_in_white_space_has_one_part_that_is_incomplete():
    frame = {"id": "chatcmpl-1", "created": 5, "model": "tiny"}
    deltas = [{"reasoning": "0"}, {"content": " "}]
    translator = response_translator()
    for delta in deltas:
        translator.chunk({**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    translator.chunk({**frame, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    done = [event["item"] for event in events_of(translator.end()) if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["completed", "incomplete"]


def put_together(events: list[dict]) -> dict:
    """A message from its events, as Anthropic's documentation tells a client to do it."""
    message = next(event["message"] for event in events if event["type"] == "message_start")
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], dict(event["delta"])
            if delta.pop("type") == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                for name, piece in delta.items():
                    block[name] += piece
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


@given(answers())
def test_a_streamed_message_is_the_whole_one(answer):
    whole, chunks = answer
    expected = MessageTranslator("msg_1").whole(whole)
    translator = MessageTranslator("msg_1")
    before = events_of(b"".join(map(translator.chunk, chunks)))
    after = events_of(translator.end())
    assert before[0]["message"]["usage"] == {"input_tokens": 3, "output_tokens": 0}
    assert put_together([*before, *after]) == expected
    assert [event["type"] for event in after][-2:] == ["message_delta", "message_stop"]
    assert not [event for event in before if event["type"] in {"message_delta", "message_stop"}]
    starts = [event["index"] for event in [*before, *after] if event["type"] == "content_block_start"]
    stops = [event["index"] for event in [*before, *after] if event["type"] == "content_block_stop"]
    assert starts == stops == list(range(len(expected["content"])))


@pytest.mark.parametrize("calls", [True, False])
def test_white_space_before_a_tool_call_is_dropped_as_vllm_does_in_whole_answers(calls):
    """After the thoughts most models write two line ends; with calls behind them a whole answer has no content at all."""
    call = {"id": "call_1", "index": 0, "function": {"name": "add", "arguments": "{}"}}
    deltas = [{"reasoning": "hm"}, {"content": "\n"}, {"content": "\n"}, *([{"tool_calls": [call]}] if calls else [])]
    translator = response_translator()
    for delta in deltas:
        translator.chunk({"choices": [{"delta": delta}]})
    thought, said = events_of(translator.end())[-1]["response"]["output"]
    assert (thought["type"], said["type"]) == ("reasoning", "function_call" if calls else "message")
    assert calls or said["content"][0]["text"] == "\n\n"


def test_text_after_a_tool_call_keeps_its_white_space():
    call = {"id": "call_1", "index": 0, "function": {"name": "add", "arguments": "{}"}}
    deltas = [{"tool_calls": [call]}, {"content": "\n"}, {"content": "so "}, {"content": "\n"}, {"content": "be it"}]
    translator = response_translator()
    for delta in deltas:
        translator.chunk({"choices": [{"delta": delta}]})
    said = events_of(translator.end())[-1]["response"]["output"]
    assert [item["type"] for item in said] == ["function_call", "message"]
    assert said[1]["content"][0]["text"] == "\nso \nbe it"


def test_a_streamed_call_without_arguments_has_an_empty_object_as_a_whole_one_has():
    chunk = {"choices": [{"delta": {"tool_calls": [{"id": "call_1", "index": 0, "function": {"name": "now"}}]}}]}
    translator = response_translator()
    events = [*events_of(translator.chunk(chunk)), *events_of(translator.end())]
    (call,) = events[-1]["response"]["output"]
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    (item,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert call["arguments"] == done["arguments"] == "".join(deltas) == item["arguments"] == "{}"
    message = MessageTranslator("msg_1")
    assert put_together([*events_of(message.chunk(chunk)), *events_of(message.end())])["content"][0]["input"] == {}


def test_calls_of_a_server_that_numbers_them_all_alike_are_told_by_their_ids():
    calls = [{"id": f"call_{name}", "index": 0, "function": {"name": name, "arguments": '{"a"'}} for name in "xy"]
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    deltas = [calls[0], rest, calls[1], {**rest, "id": "call_y"}]
    translator = response_translator()
    for delta in deltas:
        translator.chunk({"choices": [{"delta": {"tool_calls": [delta]}}]})
    found = events_of(translator.end())[-1]["response"]["output"]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in found] == [
        ("call_x", "x", '{"a": 1}'),
        ("call_y", "y", '{"a": 1}'),
    ]
    with pytest.raises(ValueError, match="'call_z', which nothing began"):
        response_translator().chunk({"choices": [{"delta": {"tool_calls": [calls[0], {**rest, "id": "call_z"}]}}]})


def test_arguments_that_are_no_json_object_are_wrapped():
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": '}}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "length", "stop_reason": None}
    (block,) = MessageTranslator("msg_1").whole({"model": "tiny", "choices": [choice]})["content"]
    assert block["input"] == {"INVALID_JSON": '{"a": '}


def test_what_breaks_off_says_so_in_the_dialects_shape():
    refusal = RefusalError(502, "upstream_failed", "gone")
    (said,) = events_of(MessageTranslator("msg_1").broken(refusal))
    assert said == {"type": "error", "error": {"type": "api_error", "message": "gone"}}
    (said,) = events_of(response_translator().broken(refusal))
    assert (said["type"], said["message"], said["code"], said["sequence_number"]) == (
        "error",
        "gone",
        "upstream_failed",
        0,
    )
    assert said["error"]["message"] == "gone"
