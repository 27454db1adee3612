"""A scripted policy server with vLLM's response shapes, for tests of everything that talks to one.

The invariant: bodies, chunks, ids and nulls are those of vLLM 0.31's OpenAI server (checked against its source), so a
client or a gateway cannot tell the difference; only the tokens are made up.

    async with FakeVLLM() as fake:                     # port 0; fake.url, fake.model
        fake.queue(Reply("4", delay=0.1), Reply(tool_calls=[ToolCall("add", '{"a": 2}')]))
        ...
        assert fake.requests[0].body["temperature"] == 0.5
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from lightning.testing.vllm_replies import (
    NO_TEXT,
    SYSTEM_NOT_FIRST,
    ChatShape,
    CompletionShape,
    Generation,
    Job,
    Recorded,
    Refusal,
    Reply,
    ReplyToken,
    Shape,
    ToolCall,
    cannot_be_tokenized,
    compact,
    detokenize,
    error_object,
    refusal,
    tokenize_reply,
    too_long,
)
from lightning.types import as_texts

__all__ = ["FakeVLLM", "Recorded", "Reply", "ToolCall"]

Script = Callable[[Mapping[str, Any]], Reply]


@dataclass
class FakeVLLM:
    """The server. Start it with `async with`, or `start`/`close`; `port` 0 takes a free one.

    Replies come from the queue, then from `script(request body)`, then are `default`. `requests` holds what arrived, `aborted`
    the request ids whose client hung up. `healthy` is the answer of `/health`, `packs` whether it has our middleware for
    logprobs (`lightning.policy_server.packed_logprobs`), `tokenizes` whether it has `/tokenize`. Of its chat template
    `shows_tools` says whether it knows tools, `system_first` whether it refuses a system message that is not the first, and
    `skips_thinking` whether it heeds `enable_thinking`. `aliases` are further names of the model, `claim` is the word that a
    trainer left. `pause`/`resume` freeze sampling as `/pause?mode=keep` does; `in_flight()` then is what a policy server
    reports in `Update.in_flight`.
    """

    model: str = "tiny"
    aliases: tuple[str, ...] = ()
    claim: str = ""
    default: Reply = field(default_factory=Reply)
    script: Script | None = None
    port: int = 0
    healthy: bool = True
    packs: bool = True
    shows_tools: bool = True
    system_first: bool = False
    skips_thinking: bool = False
    tokenizes: bool = True
    max_model_len: int = 131_072
    url: str = ""
    requests: list[Recorded] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        as_texts(self.aliases, "aliases")
        self._queue: deque[Reply] = deque()
        self._jobs: set[Job] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._turning = asyncio.Event()
        self._turning.set()
        self._runner: web.AppRunner | None = None

    @property
    def _chat_shape(self) -> ChatShape:
        return ChatShape(self.shows_tools, self.skips_thinking)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.model, *self.aliases)

    def queue(self, *replies: Reply) -> None:
        """Answer the next requests with these replies (one for each choice when `n > 1`)."""
        self._queue.extend(replies)

    def pause(self) -> None:
        """Freeze sampling: requests in flight stop where they are, new ones wait."""
        self._running.clear()

    def resume(self) -> None:
        """Go on sampling."""
        self._running.set()

    def hang(self) -> None:
        """Make the engine stand still, as one whose device hangs: only routes that do not need it answer (`/health`)."""
        self._turning.clear()

    def in_flight(self) -> dict[str, int]:
        """Return the tokens sampled so far by each choice of the unanswered requests, with the keys of `Update.in_flight`."""
        return {job.key(item.index): item.sampled for job in self._jobs for item in job.generations}

    async def start(self) -> None:
        """Listen on the loopback address."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/collective_rpc", self._rpc)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=4096)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def close(self) -> None:
        """Stop, cutting every connection, as a killed server does. Starting again keeps the port."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # routes -----------------------------------------------------------------------------------------------------
    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"object": "model", "created": 1, "owned_by": "vllm", "root": self.model}
        rest = {**card, "parent": None, "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [{"id": name, **rest} for name in self._names]})

    async def _rpc(self, request: web.Request) -> web.Response:
        """Answer the worker extension's `lightning_attach`, which the engine answers between two steps."""
        await self._turning.wait()
        return web.json_response({"results": [{"version": 0, "pid": 1, "claim": self.claim}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            return error_response(404, "Not Found", "NotFoundError")
        body = json.loads(await request.read())
        if body.get("model", self.model) not in self._names:
            return error_response(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        if cannot_be_tokenized(body):
            return error_response(400, NO_TEXT, "BadRequestError")
        if why := self._template_refusal(body):
            return error_response(400, why[0], "BadRequestError", why[1])
        (ids,) = self._chat_shape.prompts(body)
        answer = {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": None}
        return web.json_response(answer)

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": detokenize(json.loads(await request.read())["tokens"])})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, self._chat_shape)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, CompletionShape())

    async def _serve(self, request: web.Request, shape: Shape) -> web.StreamResponse:
        body = json.loads(await request.read())
        headers = {name.lower(): value for name, value in request.headers.items()}
        recorded = Recorded(request.path, headers, body, time.time())
        self.requests.append(recorded)
        if body.get("model") not in self._names:
            return error_response(404, f"The model `{body.get('model')}` does not exist.", "NotFoundError")
        if cannot_be_tokenized(body):
            return error_response(400, NO_TEXT, "BadRequestError")
        if problem := too_long(shape, body, self.max_model_len):
            return error_response(400, *problem)
        fails = bool(self._queue) and self._queue[0].status != 200  # what a test says comes first
        if not fails and isinstance(shape, ChatShape) and (why := refusal(body) or self._template_refusal(body)):
            return error_response(400, why[0], "BadRequestError", why[1])
        job = self._job(recorded, shape)
        first = job.generations[0].reply
        if first.status != 200:
            return error_response(first.status, first.message, "BadRequestError")
        self._jobs.add(job)
        try:
            if body.get("stream"):
                return await self._stream(request, job, shape)
            return await self._whole(request, job, shape)
        except asyncio.CancelledError:
            self.aborted.append(recorded.request_id)
            raise
        finally:
            self._jobs.discard(job)

    def _template_refusal(self, body: Mapping[str, Any]) -> Refusal | None:
        late = any(message.get("role") == "system" for message in body["messages"][1:])
        return SYSTEM_NOT_FIRST if self.system_first and late else None

    def _job(self, recorded: Recorded, shape: Shape) -> Job:
        body = recorded.body
        prompts = shape.prompts(body)
        count = (body.get("n") or 1) * len(prompts)
        replies = [self._next_reply(body) for _ in range(count)]
        generations = [Generation(index, reply, tokenize_reply(reply, index)) for index, reply in enumerate(replies)]
        request_id = f"{shape.prefix}{recorded.request_id or uuid.uuid4().hex}"
        return Job(recorded, generations, prompts, request_id, int(recorded.at), self.packs)

    def _next_reply(self, body: Mapping[str, Any]) -> Reply:
        if self._queue:
            return self._queue.popleft()
        return self.default if self.script is None else self.script(body)

    # generation -------------------------------------------------------------------------------------------------
    async def _whole(self, request: web.Request, job: Job, shape: Shape) -> web.StreamResponse:
        async for generation, _ in self._sample(job):
            if generation.reply.die_after is not None and generation.sampled >= generation.reply.die_after:
                return cut(request)
        raw = job.generations[0].reply.raw
        if raw is not None:
            return web.Response(body=raw, content_type="application/json")
        return web.json_response(shape.whole(job, self.model))

    async def _stream(self, request: web.Request, job: Job, shape: Shape) -> web.StreamResponse:
        reply = job.generations[0].reply
        if reply.die_after == 0:
            return cut(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        writer = EventWriter(response, reply.chunk_bytes)
        for chunk in shape.opening(job, self.model):
            await writer.event(chunk)
        async for generation, token in self._sample(job):
            for chunk in shape.chunks(job, generation, token, self.model):
                await writer.event(chunk)
            if reply.die_after is not None and generation.sampled >= reply.die_after:
                return cut(request)
            if reply.error_after is not None and generation.sampled >= reply.error_after:
                await writer.event({"error": error_object(500, reply.message, "InternalServerError")})
                break
        else:
            if (job.request.body.get("stream_options") or {}).get("include_usage"):
                await writer.event(shape.usage_chunk(job, self.model))
        await writer.raw(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _sample(self, job: Job) -> AsyncIterator[tuple[Generation, ReplyToken]]:
        """Produce tokens round robin over the choices, one at a time, standing still while paused."""
        delay = max(item.reply.delay for item in job.generations)
        pause = max(item.reply.token_delay for item in job.generations)
        if delay:
            await asyncio.sleep(delay)
        while not all(item.done for item in job.generations):
            for item in job.generations:
                if item.done:
                    continue
                await self._running.wait()
                await self._turning.wait()
                token = item.tokens[item.sampled]
                item.sampled += 1
                item.done = item.sampled == len(item.tokens)
                yield item, token
            if pause:
                await asyncio.sleep(pause)


class EventWriter:
    """Writes events to a stream, cut into pieces of `size` bytes when that is not 0."""

    def __init__(self, response: web.StreamResponse, size: int) -> None:
        self._response, self._size = response, size

    async def event(self, chunk: Mapping[str, Any]) -> None:
        """Write one `data:` event."""
        await self.raw(b"data: " + compact(chunk) + b"\n\n")

    async def raw(self, data: bytes) -> None:
        """Write bytes without a frame."""
        size = self._size or len(data)
        for start in range(0, len(data), size):
            await self._response.write(data[start : start + size])
            if self._size:
                await asyncio.sleep(0)


def error_response(status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    """Return an answer with vLLM's error object."""
    return web.json_response({"error": error_object(status, message, kind, param)}, status=status)


def cut(request: web.Request) -> web.Response:
    """Drop the connection, as a dying server does."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
