"""The optimiser model over HTTP: one question, one answer, from any OpenAI-compatible endpoint.

The invariant: the key is read from the environment for each request and appears in no error, log or record; a failure that
may pass is tried again with growing pauses, and one that will not pass says what to change.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Final

import aiohttp
from lightning.errors import ConfigError, OptimizerError

from lightning_prompts.protocol import Messages, OptimizerModel

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Seconds between attempts: doubled each time, or as long as the endpoint asks for (`Retry-After`)."""
PASSING: Final = frozenset({408, 409, 425, 429})
"""Statuses besides 5xx after which the same request may succeed."""
WRONG: Final = frozenset({401, 403, 404})
"""Statuses that every further request would get too."""


class _PassingError(Exception):
    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class OptimizerClient:
    """Asks the model, at most `model.concurrency` questions at a time."""

    def __init__(self, model: OptimizerModel) -> None:
        self._model = model
        self._slots = asyncio.Semaphore(model.concurrency)

    async def ask(self, messages: Messages) -> str:
        """The text of the answer, empty when the model said nothing.

        Raises `OptimizerError` when no attempt succeeded or the endpoint refused this request, `ConfigError` when it refuses
        every request: a wrong key, URL or model name.
        """
        async with self._slots:
            for attempt in range(self._model.attempts):
                try:
                    return await self._once(messages)
                except _PassingError as error:
                    if attempt + 1 == self._model.attempts:
                        raise OptimizerError(
                            f"the optimiser model {self._model.model!r} at {self._model.base_url} did not answer in "
                            f"{self._model.attempts} attempts; the last: {error}"
                        ) from error
                    await asyncio.sleep(error.pause or min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE))
        raise AssertionError("attempts are at least one")

    async def _once(self, messages: Messages) -> str:
        model = self._model
        key = os.environ.get(model.api_key_env, "").strip() if model.api_key_env else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body: dict[str, object] = {"model": model.model, "messages": list(messages)}
        if model.temperature is not None:
            body["temperature"] = model.temperature
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
            raise OptimizerError(f"{url} answered with something that is no chat completion") from error
        return said.encode("utf-8", "replace").decode()  # half a character, which no file and no request takes

    def _refused(self, status: int, text: str, retry_after: str) -> Exception:
        if status in PASSING or status >= 500:
            pause = float(retry_after) if retry_after.replace(".", "", 1).isdecimal() else 0.0
            return _PassingError(f"status {status}: {text}", min(pause, LONGEST_PAUSE))
        model = self._model
        if status in WRONG:
            return ConfigError(
                f"the optimiser model {model.model!r} at {model.base_url} cannot be used (status {status}: {text}): check "
                f"its name, the URL, and the key in the environment variable {model.api_key_env or '(none is set)'}"
            )
        return OptimizerError(f"the optimiser model {model.model!r} refused a request (status {status}: {text})")
