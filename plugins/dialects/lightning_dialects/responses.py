"""`/v1/responses`: OpenAI's Responses API, translated to chat completions of vLLM.

The invariant: the prompt is the one that the same conversation would have through `/v1/chat/completions`. The object in the
last event of a stream is the one that the whole answer would have been.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning.gateway.dialects import refuse_parameter
from lightning.gateway.http import Body, RefusalError

from lightning_dialects.client_tools import ClientTool, client_tools, item_of
from lightning_dialects.responses_request import (
    chat_request,
    hosted_tools,
    messages_of,
    namespaces,
    without_hosted_tools,
)
from lightning_dialects.translated import Event, Kind, Part, Step, Translated, Translator, event, readable

ECHOED: Mapping[str, object] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}
"""The parameters of a request that a Response repeats, with the API's defaults."""
SAMPLING = {"temperature": 1.0, "top_p": 1.0}
"""Sampling parameters that a Response repeats, with the defaults. Their values are those sent to vLLM, because the gateway's
settings and the key may override the agent's."""
PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.TOOL: "fc"}


class Responses(Translated):
    """OpenAI's Responses API as a dialect of the gateway."""

    path = "/responses"
    id_prefix = "resp_"

    def continues(self, body: Body) -> str | None:
        """Return the `previous_response_id` of a request; None without one."""
        previous = body.get("previous_response_id")
        return None if previous is None else str(previous)

    def translate(self, body: Body, before: Sequence[Body], response_id: str) -> tuple[Body, Translator | None]:
        """Translate a request of the Responses API to a chat request that begins with the earlier messages (`before`). Return
        the chat request and the translator of its answer. Raises `RefusalError` (422) for a request that cannot be
        translated."""
        body = self.runnable(body)
        if not body.get("input") and not (before and body.get("input") is None):
            raise refuse_parameter("input", "is missing or empty; send a text or a list of items.")
        instructions = body.get("instructions")
        if instructions is not None and not isinstance(instructions, str):
            raise refuse_parameter("instructions", f"must be a string, not {type(instructions).__name__}.")
        with readable():
            said = messages_of(body.get("input") or [], before)
            # Instructions hold for one response; the rest of the conversation is carried on.
            system = [{"role": "system", "content": instructions}] if instructions else []
            chat, names = chat_request(body, [*system, *said]), ToolNames(namespaces(body), client_tools(body))
        return chat, ResponseTranslator(response_id, body, chat, names, said)

    def hosted_tools(self, body: Body) -> list[str]:
        """Return the types of a request's tools that OpenAI's servers would run. Raises `RefusalError` (422)."""
        with readable():
            return hosted_tools(body)

    def without_hosted_tools(self, body: Body) -> Body:
        """Return the request without the tools that OpenAI's servers would run."""
        return without_hosted_tools(body)


class ToolNames(NamedTuple):
    """The tools of a request that are not plain functions, by the name that the model sees: `spaces` has (namespace, name) of
    the tools in a namespace, `others` has the client tools."""

    spaces: Mapping[str, tuple[str, str]]
    others: Mapping[str, ClientTool]


class ResponseTranslator(Translator):
    """Translates vLLM's chat answer to a Response. `asked` is the request as the agent sent it, `chat` as it goes to vLLM;
    `names` are the tools that are not plain functions; `said` is the conversation so far, without the instructions."""

    def __init__(self, response_id: str, asked: Body, chat: Body, names: ToolNames, said: Sequence[Body]) -> None:
        super().__init__(response_id)
        self._asked, self._chat, self._names, self._said = asked, chat, names, said
        self._created, self._sequence = int(time.time()), 0
        self._keep_logprobs = bool(chat.get("logprobs"))
        self._logprobs: list[Body] = []
        self._piece_logprobs: list[Body] = []

    def end(self) -> bytes:
        """Return the events that end a stream."""
        self._piece_logprobs = []
        return super().end()

    def broken(self, refusal: RefusalError) -> bytes:
        """Return the event that tells the agent that a stream broke off. OpenAI's clients raise only if it has an `error`
        object."""
        error = refusal.error
        return self._written([{**error, "type": "error", "error": error}])

    def conversation(self) -> list[Body] | None:
        """Return the chat messages up to and with this answer, for later requests; None if the request had `store` false."""
        return None if self._asked.get("store") is False else messages_of(self._output(), self._said)

    def _read(self, answer: Body, choice: Body | None) -> None:
        super()._read(answer, choice)
        self._created = answer.get("created") or self._created
        self._piece_logprobs = []
        if self._keep_logprobs and choice is not None and (holder := choice.get("logprobs")):
            self._piece_logprobs = holder.get("content") or []
            self._logprobs += self._piece_logprobs

    def answer(self) -> Body:
        """Return the Response for the whole answer, also for an answer that was read as a stream."""
        return self._response("incomplete" if self._finish == "length" else "completed")

    def _response(self, status: str) -> Body:
        asked, chat = self._asked, self._chat
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": self._output() if status in {"completed", "incomplete"} else [],
            "prompt": None,
            "reasoning": {"effort": None, "summary": None, **(asked.get("reasoning") or {})},
            "usage": usage_of(self._usage),
            **{name: default if asked.get(name) is None else asked[name] for name, default in ECHOED.items()},
            **{name: default if chat.get(name) is None else chat[name] for name, default in SAMPLING.items()},
        }

    def _output(self) -> list[Body]:
        return [self._item(part, self._ended(part)) for part in self._parts.all]

    def _ended(self, part: Part) -> str:
        """Return the status of an ended part: "incomplete" for the last part of an answer that was cut off at its limit."""
        cut = self._finish == "length" and part is self._parts.all[-1]
        return "incomplete" if cut else "completed"

    def _item(self, part: Part, status: str) -> Body:
        frame: Body = {"id": self._item_id(part), "status": status}
        empty = status == "in_progress"
        if part.kind is Kind.TEXT:
            content = [] if empty else [self._text(part)]
            return {**frame, "type": "message", "role": "assistant", "content": content}
        if part.kind is Kind.REASONING:
            content = [] if empty else [{"type": "reasoning_text", "text": part.text}]
            return {**frame, "type": "reasoning", "summary": [], "content": content}
        if (other := self._of_the_client(part)) is not None:
            return {**frame, "call_id": part.call_id, **other}
        space, name = self._names.spaces.get(part.name, ("", part.name))
        call = {**frame, "type": "function_call", "call_id": part.call_id, "name": name, "arguments": part.text}
        return {**call, "namespace": space} if space else call

    def _of_the_client(self, part: Part) -> Body | None:
        """Return the client's item for a complete call of a client tool; None for any other part."""
        tool = self._names.others.get(part.name) if part.kind is Kind.TOOL else None
        return None if tool is None else item_of(tool, part.name, part.text)

    def _item_id(self, part: Part) -> str:
        return f"{PREFIXES[part.kind]}_{self._id.removeprefix('resp_')}_{part.index}"

    def _text(self, part: Part) -> Body:
        """Return a text part. The last text part has all logprobs so far, also the logprobs of tokens that are not text, as in
        vLLM."""
        texts = [item for item in self._parts.all if item.kind is Kind.TEXT]
        said = [logprob_of(entry) for entry in self._logprobs] if texts[-1] is part else []
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": said}

    def _beginning(self, chunk: Body) -> list[Body]:
        if self._sequence:
            return []
        begun = self._response("in_progress")
        return [{"type": kind, "response": begun} for kind in ("response.created", "response.in_progress")]

    def _ending(self) -> list[Body]:
        response = self.answer()
        return [{"type": f"response.{response['status']}", "response": response}]

    def _written(self, said: list[Body]) -> bytes:
        """Encode events, numbered over the whole stream."""
        first, self._sequence = self._sequence, self._sequence + len(said)
        return b"".join(event({**body, "sequence_number": first + number}) for number, body in enumerate(said))

    def _events(self, happened: Event) -> Iterator[Body]:
        step, part, piece = happened
        if part.kind is Kind.TOOL and part.name in self._names.others:
            yield from self._events_of_the_client(step, part)
            return
        item_id, place = self._item_id(part), {"output_index": part.index}
        if step is Step.OPEN:
            yield {"type": "response.output_item.added", **place, "item": self._item(part, "in_progress")}
        where = {"item_id": item_id, **place}
        if part.kind is Kind.TOOL:
            yield from self._tool_events(step, part, piece, where)
        else:
            yield from self._text_events(step, part, piece, {**where, "content_index": 0})
        if step is Step.CLOSE:
            yield {"type": "response.output_item.done", **place, "item": self._item(part, self._ended(part))}

    def _events_of_the_client(self, step: Step, part: Part) -> Iterator[Body]:
        """Yield all events of a client tool's call when the call has ended: only then is it known whether the call's arguments
        fit."""
        if step is not Step.CLOSE:
            return
        place, item = {"output_index": part.index}, self._item(part, self._ended(part))
        begun = {**item, "status": "in_progress", **({"input": ""} if "input" in item else {})}
        begun |= {"arguments": ""} if "arguments" in item else {}
        yield {"type": "response.output_item.added", **place, "item": begun}
        where = {"item_id": item["id"], **place}
        for name, kind in (
            ("input", "response.custom_tool_call_input"),
            ("arguments", "response.function_call_arguments"),
        ):
            if name in item:
                yield {"type": f"{kind}.delta", **where, "delta": item[name]}
                named = {"name": item["name"]} if name == "arguments" else {}
                yield {"type": f"{kind}.done", **where, **named, name: item[name]}
        yield {"type": "response.output_item.done", **place, "item": item}

    def _tool_events(self, step: Step, part: Part, piece: str, where: Body) -> Iterator[Body]:
        if step is Step.ADD:
            yield {"type": "response.function_call_arguments.delta", **where, "delta": piece}
        elif step is Step.CLOSE:
            name = self._names.spaces.get(part.name, ("", part.name))[1]
            yield {"type": "response.function_call_arguments.done", **where, "name": name, "arguments": part.text}

    def _text_events(self, step: Step, part: Part, piece: str, where: Body) -> Iterator[Body]:
        thinks = part.kind is Kind.REASONING
        kind = "response.reasoning_text" if thinks else "response.output_text"
        if step is Step.ADD:
            delta = {"type": f"{kind}.delta", **where, "delta": piece}
            yield delta if thinks else {**delta, "logprobs": [logprob_of(entry) for entry in self._piece_logprobs]}
            return
        content: Body = {"type": "reasoning_text", "text": part.text} if thinks else self._text(part)
        if step is Step.OPEN:
            yield {"type": "response.content_part.added", **where, "part": content}
            return
        done = {"type": f"{kind}.done", **where, "text": part.text}
        yield done if thinks else {**done, "logprobs": content["logprobs"]}
        yield {"type": "response.content_part.done", **where, "part": content}


def logprob_of(entry: Body) -> Body:
    """Return one token's logprob with the fields of this API, without those that vLLM adds."""
    said: Body = {name: entry.get(name) for name in ("token", "logprob", "bytes")}
    top = [{name: item.get(name) for name in said} for item in entry.get("top_logprobs") or ()]
    return {**said, "top_logprobs": top}


def usage_of(usage: Body | None) -> Body | None:
    """Return token counts under the names of this API; None if vLLM gave none."""
    if usage is None:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.get("completion_tokens") or 0,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }
