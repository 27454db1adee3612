"""Client of a chat model that helps an algorithm (a judge, an optimizer of prompts), at any OpenAI-compatible endpoint.

The invariant: the key is read from the environment for each request and appears in no error, log or record. A request that
fails for a passing reason is repeated with growing pauses; the error of any other failure says what to change.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning.errors import ConfigError, LightningError
from lightning.outside_requests import OUTSIDE

Messages = Sequence[Mapping[str, str]]
"""A chat: `[{"role": "user", "content": "..."}]`."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""The longest pause between attempts, in seconds. Pauses begin with `FIRST_PAUSE` and double each time, unless the endpoint
says how long to wait (`Retry-After`)."""
PASSING: Final = frozenset({408, 409, 425, 429})
"""Statuses besides 5xx after which the same request may succeed."""
WRONG: Final = frozenset({401, 403, 404})
"""Statuses that every further request would get too, since name, URL or key are wrong."""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The settings of a chat model at an OpenAI-compatible endpoint.

    `base_url` ends before `/chat/completions`. `api_key_env` names the environment variable that holds the key, which is read
    for each request and never kept. A request that gets no answer within `timeout` seconds is sent up to `attempts` times; at
    most `concurrency` requests are open at once. A `temperature` of None is not sent, since some endpoints refuse any. `role`
    is the model's name in messages, `failure` the class of the error that is raised when it does not answer.
    """

    model: str
    base_url: str
    api_key_env: str = "OPENAI_API_KEY"
    temperature: float | None = 1.0
    timeout: float = 120.0
    attempts: int = 4
    concurrency: int = 8

    role: ClassVar[str]
    failure: ClassVar[type[LightningError]]

    def __post_init__(self) -> None:
        from lightning.config import check_endpoint  # pydantic: no command but those that train needs it

        check_endpoint(self.base_url, self.api_key_env, self.role)
        if self.attempts < 1 or self.concurrency < 1 or not self.timeout > 0 or (self.temperature or 0) < 0:
            raise ConfigError(
                f"{self.role} needs attempts and concurrency of at least 1, a positive timeout, and no negative temperature"
            )

    def settings(self) -> dict[str, object]:
        """Return the fields of a request's body besides its messages."""
        return {"model": self.model} | ({} if self.temperature is None else {"temperature": self.temperature})


class _PassingError(Exception):
    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class ChatClient:
    """A client that sends requests to the model, at most `model.concurrency` at a time."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._slots = asyncio.Semaphore(model.concurrency)

    async def ask(self, messages: Messages) -> str:
        """Send the messages and return the text of the answer, which is empty if the model wrote none.

        Raises the model's `failure` if no attempt succeeded or the endpoint refused this request, and `ConfigError` if the
        endpoint would refuse every request because of a wrong key, URL or model name.
        """
        async with self._slots:
            for attempt in range(self._model.attempts):
                try:
                    return await self._once(messages)
                except _PassingError as error:
                    if attempt + 1 == self._model.attempts:
                        raise self._model.failure(
                            f"{self._model.role} {self._model.model!r} at {self._model.base_url} did not answer in "
                            f"{self._model.attempts} attempts; the last: {error}"
                        ) from error
                    await asyncio.sleep(error.pause or min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE))
        raise AssertionError("attempts are at least one")

    async def _once(self, messages: Messages) -> str:
        import aiohttp  # here, because an algorithm is made without it

        model = self._model
        if refused := OUTSIDE.refused(f"{model.role} {model.model!r}"):
            raise model.failure(refused)
        key = os.environ.get(model.api_key_env, "").strip() if model.api_key_env else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = model.settings() | {"messages": list(messages)}
        url = f"{model.base_url.rstrip('/')}/chat/completions"
        timeout = aiohttp.ClientTimeout(total=model.timeout)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers, trust_env=True) as session,
                session.post(url, json=body) as reply,
            ):
                text = await reply.text(errors="replace")
        except TimeoutError as error:
            raise _PassingError(f"no answer within {model.timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise _PassingError(f"{type(error).__name__}: {error}") from error
        if reply.status >= 400:
            told = text.replace(key or "\0", "<api key>")[:300]
            raise self._refused(reply.status, told, reply.headers.get("Retry-After", ""))
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise _PassingError(f"an answer that is not JSON: {error}") from error
        try:
            said = str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as error:
            raise model.failure(f"{url} answered with something that is no chat completion") from error
        return said.encode("utf-8", "replace").decode()  # a lone surrogate, which no file or request takes, becomes ?

    def _refused(self, status: int, text: str, retry_after: str) -> Exception:
        if status in PASSING or status >= 500:
            pause = float(retry_after) if retry_after.replace(".", "", 1).isdecimal() else 0.0
            return _PassingError(f"status {status}: {text}", min(pause, LONGEST_PAUSE))
        model = self._model
        if status in WRONG:
            return ConfigError(
                f"{model.role} {model.model!r} at {model.base_url} cannot be used (status {status}: {text}): check "
                f"its name, the URL, and the key in the environment variable {model.api_key_env or '(none is set)'}"
            )
        return model.failure(f"{model.role} {model.model!r} refused a request (status {status}: {text})")
