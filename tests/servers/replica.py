"""A policy server that is a `FakeVLLM`, may be killed, and knows which version of the weights sampled each token.

The invariant: as with a vLLM that a trainer starts, each start has a new name for the model, the port stays the same, a killed
server cuts its connections, and nothing is sampled while weights change.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning.errors import PolicyServerError
from lightning.policy_server.protocol import Probe, Update, Usage
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.testing.vllm_replies import Generation, Job, ReplyToken

STARTS = itertools.count(1)
Script = Callable[[Mapping[str, Any]], Reply]


@dataclass
class TellingVLLM(FakeVLLM):
    """A `FakeVLLM` with a version, which notes in `truth` the version of each token, by the request's id. `complete` counts the
    tokens of requests whose answers may still be on their way since the last update."""

    version: int = 0
    complete: dict[str, int] = field(default_factory=dict)
    truth: dict[str, list[int]] = field(default_factory=dict)

    async def _sample(self, job: Job) -> AsyncIterator[tuple[Generation, ReplyToken]]:
        sampled = self.truth[job.request.request_id] = list[int]()
        async for generation, token in super()._sample(job):
            sampled.append(self.version)
            if generation.done:
                self.complete[job.request.request_id] = len(sampled)
            yield generation, token


class Replica:
    """One of several policy servers. `truth`, which several may share, has the versions of the tokens that its starts have
    sampled, by the request; of a request that was sent again the last time counts. `requests` counts their requests.
    `load_seconds` is how long it takes weights. `refuses` makes the next update fail, before (`"clean"`) or after (`"lost"`)
    the weights have changed. `policies` are those that answer here, each with whether it is trained: a trained one has an
    adapter."""

    model, claim = "policy", ""

    def __init__(
        self,
        script: Script,
        *,
        load_seconds: float = 0.0,
        start_seconds: float = 0.0,
        truth: dict[str, list[int]] | None = None,
        policies: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        self._policies = policies
        self._script, self._load, self._start = script, load_seconds, start_seconds
        self.truth = {} if truth is None else truth
        self.served: list[str] = []
        self.refuses = ""
        self.starts = self.deaths = 0
        self.prober: Callable[[Probe], list[float]] = lambda probe: list(probe.logprobs[1:])
        self._died = asyncio.Event()
        self.fake = self._made(0, 0)
        self._gone = True

    def _made(self, port: int, version: int) -> TellingVLLM:
        alias = f"policy-{next(STARTS)}"
        adapters = (f"{alias}/{policy}" for policy, trained in self._policies.items() if trained)
        return TellingVLLM(
            model=self.model,
            aliases=(alias, *adapters),
            script=self._script,
            port=port,
            version=version,
            truth=self.truth,
        )

    @property
    def url(self) -> str:
        return self.fake.url

    @property
    def alias(self) -> str:
        return self.fake.aliases[0]

    @property
    def models(self) -> tuple[tuple[str, str], ...]:
        """Each policy with the model name of its calls."""
        return tuple((name, f"{self.alias}/{name}" * trained or self.alias) for name, trained in self._policies.items())

    @property
    def version(self) -> int:
        return self.fake.version

    @property
    def requests(self) -> int:
        """How many requests all starts have got."""
        return len(self.served) + len(self.fake.requests)

    async def start(self) -> None:
        await self.fake.start()
        self.starts, self._gone = self.starts + 1, False

    async def healthy(self) -> bool:
        return not self._gone

    async def usage(self) -> Usage | None:
        return None if self._gone else Usage(len(self.fake.requests))

    async def update(self, weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> Update:
        fake = self.fake
        refused, self.refuses = self.refuses, ""
        if refused == "clean":
            raise PolicyServerError("the file does not fit")
        fake.pause()
        in_flight = {**fake.complete, **fake.in_flight()}
        fake.complete.clear()
        await asyncio.sleep(self._load)
        if self._gone or self.fake is not fake:
            raise PolicyServerError("the connection was reset")
        fake.version = version
        if refused == "lost":
            raise PolicyServerError("the probe was not answered")
        fake.resume()
        return Update(version, in_flight, self._load, [self.prober(probe) for probe in probes])

    async def kill(self) -> None:
        """End it as `kill -9` does."""
        self.deaths, self._gone = self.deaths + 1, True
        await self.fake.close()
        self._died.set()

    async def wait_died(self) -> None:
        await self._died.wait()

    async def restart(self, weights: Path | None, version: int) -> None:
        if not self._gone:
            await self.fake.close()
        self._gone = True
        self.served += [request.request_id for request in self.fake.requests]
        self._died.clear()
        await asyncio.sleep(self._start)
        if weights is not None and not weights.exists():
            raise PolicyServerError(f"{weights} is gone")
        self.fake = self._made(self.fake.port, version)
        await self.start()

    async def close(self) -> None:
        self._gone = True
        await self.fake.close()
