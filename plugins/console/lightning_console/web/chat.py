"""The chat page: a conversation with a served model through the server's gateway, which records every call.

The invariant: messages are shown as text. A conversation belongs to one visitor, is bounded, and ends with the server.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from lightning.bounded import Bounded
from lightning.errors import DataError, GatewayError
from lightning.store.protocol import Store
from lightning.types import DEFAULT_PROJECT, LLM
from lightning_server.protocol import Host

from lightning_console.blocks import (
    Action,
    Actions,
    Block,
    Control,
    Controls,
    Link,
    Message,
    Messages,
    Notice,
    Notices,
    Page,
)
from lightning_console.router import Address
from lightning_console.web.gate import Visitor, need_changes

CONVERSATIONS: Final = 256
TURNS: Final = 40
"""Most messages of a conversation; the oldest are dropped."""
LONGEST: Final = 20_000
"""Most characters of a message."""
KEY_SECONDS: Final = 3_600.0
ANSWER_SECONDS: Final = 120.0
ANSWER_TOKENS: Final = 512
RUNS: Final = 20
"""Most runs, from the newest, whose model may be served. They are taken from the `LISTED` newest runs without those that
recorded a chat."""
LISTED: Final = 500
NAME: Final = "console"
"""The name of the runs that record chats."""
START: Final = (
    "lightning serve RUN --out runs/chat",
    "lightning token create trainer --store runs/chat",
)
TRAIL: Final = (Link("Runs", "runs"),)


@dataclass(slots=True)
class _Conversation:
    llm: LLM
    until: float
    messages: list[dict[str, str]] = field(default_factory=list)


class Chat:
    """All visitors' conversations with the models of a server; `host` is None for a console without a server."""

    def __init__(self, host: Host | None) -> None:
        self._host = host
        self._open = Bounded[tuple[str, str], _Conversation](CONVERSATIONS)

    async def page(self, store: Store | None, who: Visitor, address: Address) -> Page:
        """Make the page `chat?run=RUN`. `store` is the visitor's view of the server's store."""
        text = str(address)
        if self._host is None or store is None:
            notice = Notice(
                "No model is served here: a chat goes through the gateway of a server, which records it.",
                "muted",
                detail="Serve a finished run or any model: RUN is its folder, such as runs/first. Then open /console of the "
                "address that is printed, and log in with the token that the second command makes:",
                commands=START,
            )
            return Page(text, "Chat", [Notices([notice])], TRAIL)
        served = await self._served(store)
        if not served:
            said = "No run's model is served now. A run's is while its trainer is up and uses this server's database."
            detail = "To serve a finished run or any model: RUN is its folder, such as runs/first."
            notice = Notice(said, "muted", detail=detail, commands=START[:1])
            return Page(text, "Chat", [Notices([notice])], TRAIL)
        run = address.option("run", served[0][0])
        blocks: list[Block] = []
        if len(served) > 1:
            blocks.append(Controls(text, [Control("run", "Model of", run, served)]))
        if not who.changes:
            said = "A viewer's token does not call the model: log in with one of scope trainer or admin."
            return Page(text, "Chat", [*blocks, Notices([Notice(said, "muted")])], TRAIL)
        talk = self._open.get((who.session, run))
        if talk is not None and talk.messages:
            blocks.append(Messages([Message(said["role"], said["content"]) for said in talk.messages]))
        arguments = {"run": run}
        buttons = [Action("say", "Say something", arguments, fields=[("text", "Message")])]
        if talk is not None:
            buttons.append(Action("begin_again", "Begin again", arguments))
        note = "Calls go through the gateway and are recorded. Scores and training are not touched."
        return Page(text, "Chat", [*blocks, Actions(buttons, note=note)], TRAIL)

    async def act(self, store: Store | None, who: Visitor, name: str, given: dict[str, Any]) -> str:
        """Do the action `say` or `begin_again`, and return what was done. Raises `ConfigError` for a viewer, `DataError` for a
        message or a run that is not valid, `GatewayError` if there is no answer."""
        need_changes(who)
        run, text = str(given.get("run", "")), str(given.get("text", "")).strip()
        if name == "begin_again":
            self._open.pop((who.session, run), None)
            return "forgotten here; the calls stay recorded"
        if self._host is None or store is None:
            raise GatewayError("no model is served here")
        if not 0 < len(text) <= LONGEST:
            raise DataError(f"a message has 1 to {LONGEST} characters, and this one has {len(text)}")
        found = await store.get_run(run) if run else None
        if run and found is None:
            raise DataError(f"there is no run {run[:100]!r}")
        project = found.project if found is not None else who.project or DEFAULT_PROJECT
        talk = await self._conversation(self._host, who, run, project)
        asked = [*talk.messages, {"role": "user", "content": text}]
        talk.messages = [*asked, {"role": "assistant", "content": await _answer(talk.llm, asked)}][-TURNS:]
        return "answered"

    async def _served(self, store: Store) -> list[tuple[str, str]]:
        assert self._host is not None
        if self._host.own_model:
            return [("", "this server")]
        listed = await store.list_runs(limit=LISTED, brief=True)
        runs = [run for run in listed if run.name != NAME][:RUNS]
        return [(run.id, run.id) for run in runs if await self._host.served(run.id)]

    async def _conversation(self, host: Host, who: Visitor, run: str, project: str) -> _Conversation:
        key = (who.session, run)
        talk = self._open.used(key)
        if talk is None or talk.until < time.monotonic() + ANSWER_SECONDS:
            llm = await host.open_session(NAME, KEY_SECONDS, project=project, run=run)
            talk = _Conversation(llm, time.monotonic() + KEY_SECONDS, talk.messages if talk else [])
            self._open.keep(key, talk)
        return talk


async def _answer(llm: LLM, messages: list[dict[str, str]]) -> str:
    body = {"model": llm.model, "messages": messages, "max_tokens": ANSWER_TOKENS}
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    headers = {"authorization": f"Bearer {llm.api_key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(f"{llm.base_url}/chat/completions", json=body) as reply,
        ):
            answered = await reply.json(content_type=None)
            if reply.status != 200:
                raise GatewayError(f"the gateway says {reply.status}: {str(answered)[:500]}")
            return str(answered["choices"][0]["message"]["content"] or "")
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, IndexError) as error:
        raise GatewayError(f"the model did not answer: {error!r}") from error
