"""A served model that follows an alias, with clients that stream meanwhile; and versions that their probe refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from lightning.config import Config, with_settings
from lightning.errors import PolicyServerError
from lightning.gateway import Gateway, Upstream
from lightning.policy_server.protocol import Probe, Update, Usage
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.trainer.run_stages import PROBE
from lightning.trainer.training_data import all_rollouts
from lightning.types import LLM, Rollout, Task, Transition
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import put_resource, resource_uses, roll_back_alias, set_alias
from lightning_resources.reference import parse_reference
from lightning_resources.weights import WEIGHTS_NAME, weights_content
from lightning_server import following
from lightning_server.following import Follower
from lightning_server.serving import Sessions

IDS = (5, 6, 7, 8)
REFERENCE = parse_reference(f"{WEIGHTS_NAME}@live")


@dataclass
class FolderPolicy:
    """A policy server on a scripted vLLM. Its weights are a folder's `scale`: tokens have logprobs of that many times -0.5."""

    fake: FakeVLLM
    scale: float = 1.0
    version: int = 1
    word: str = "one"
    loaded: list[int] = field(default_factory=list)
    torn: bool = False
    """Whether a load of the version before fails from now on."""
    alias, models, claim, used = "tiny", (), "", Usage()

    @property
    def url(self) -> str:
        return self.fake.url

    @property
    def model(self) -> str:
        return self.fake.model

    async def update(self, weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> Update:
        self.fake.pause()
        in_flight = self.fake.in_flight()
        await asyncio.sleep(0)
        if weights is not None:
            said = json.loads((weights / "model.json").read_text())
            self.loaded.append(version)
            self.scale, self.word = said["scale"] + self.torn, said["word"]
        self.version = version
        self.fake.resume()
        served = [[-0.5 * self.scale] * (len(probe.ids) - 1) for probe in probes]
        return Update(version, in_flight, served=served)

    async def usage(self) -> Usage:
        return self.used

    async def wait_died(self) -> None:
        await asyncio.Event().wait()


@dataclass
class Served:
    """A follower, and what it looks after."""

    follower: Follower
    policy: FolderPolicy
    gateway: Gateway
    store: MemoryStore
    llm: LLM
    folder: Path

    async def put(self, word: str, scale: float = 1.0, *, probe: float | None = None) -> Resource:
        """A version that says a word; `probe` are the trainer's logprobs, None: there are none."""
        place = self.folder / word
        place.mkdir()
        (place / "config.json").write_text("{}")
        (place / "model.json").write_text(json.dumps({"scale": scale, "word": word}))
        kept = {"ids": [*IDS], "logprobs": [0.0, *[probe] * 3], "dtype": "float32"}
        metadata = {} if probe is None else {PROBE: kept}
        made = Resource(WEIGHTS_NAME, weights_content(place), ResourceKind.WEIGHTS, metadata)
        return await put_resource(self.store, made)

    async def promote(self, version: int) -> None:
        await set_alias(self.store, WEIGHTS_NAME, "live", version)

    async def until(self, version: int) -> None:
        async with asyncio.timeout(30):
            while self.follower.current.version != version:
                await asyncio.sleep(0.005)

    async def calls(self) -> list[Transition]:
        runs = [run for run in await self.store.list_runs() if run.name == "clients"]
        rollouts = [each for run in runs for each in await all_rollouts(self.store, run.id)]
        made = await self.store.transitions_of([(each.id, each.attempt) for each in rollouts])
        return [call for calls in made for call in calls]


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.01)
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVLLM())
        policy = FolderPolicy(fake)
        fake.script = lambda body: Reply(" ".join([policy.word] * 12), token_delay=0.002)
        store = MemoryStore()
        await store.open()
        stack.push_async_callback(store.close)
        config = with_settings(Config(), {"policy_server.dtype": "float32"})
        gateway = Gateway(store, [Upstream(fake.url, fake.model)], config.gateway, secret=b"s" * 32, version=1)
        await gateway.start()
        stack.push_async_callback(gateway.close)
        gateway.parts.resource = WEIGHTS_NAME
        llm = await Sessions(store, gateway, {})("clients", 3600, many=True)
        made = Served(None, policy, gateway, store, llm, tmp_path)  # type: ignore[arg-type]
        first = await made.put("one", probe=-0.5)
        await made.promote(first.version)
        made.follower = Follower(store, REFERENCE, policy, gateway, store, config, first, tmp_path / "one")
        yield made


async def stream(http: httpx.AsyncClient) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": "Go"}], "stream": True}
    async with http.stream("POST", "/chat/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        text, done = "", False
        async for line in reply.aiter_lines():
            assert '"error"' not in line, line
            done = done or line == "data: [DONE]"
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert done, text
    return text


async def test_64_streaming_clients_see_ten_promotions_and_two_rollbacks_and_no_failure(served: Served) -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
    for word in words[1:]:
        await served.put(word, probe=-0.5)
    texts: list[str] = []
    over = asyncio.Event()
    headers = {"authorization": f"Bearer {served.llm.api_key}"}
    task = asyncio.create_task(served.follower.follow())
    async with httpx.AsyncClient(base_url=served.llm.base_url, headers=headers, timeout=30) as http:

        async def client() -> None:
            while not over.is_set():
                texts.append(await stream(http))

        clients = [asyncio.create_task(client()) for _ in range(64)]
        for version in range(2, 12):
            await served.promote(version)
            await served.until(version)
            if version in (5, 9):
                moved = await roll_back_alias(served.store, WEIGHTS_NAME, "live")
                await served.until(moved.version)
        over.set()
        await asyncio.gather(*clients)
    task.cancel()
    assert len(texts) >= 64
    assert {len(set(text.split())) for text in texts} == {1}, "an answer is of one version"
    calls = await served.calls()
    assert len(calls) == len(texts)
    assert all(len(call.versions) == 1 for call in calls)
    by_version = {call.version for call in calls}
    assert by_version <= set(range(1, 12))
    told = sorted(text.split()[0] for text in texts)
    assert told == sorted(words[call.version - 1] for call in calls), (
        "each token is recorded with the version that sampled it"
    )
    assert served.policy.loaded == [2, 3, 4, 5, 4, 6, 7, 8, 9, 8, 10, 11]


@pytest.mark.parametrize(
    ("scale", "probe", "why"),
    [
        (3.0, -0.5, "differ from the trainer's by"),
        (10.0, -5.0, "became 4.5 nats less likely"),
        (10.0, None, "became 4.5 nats less likely"),
        (float("nan"), None, "less likely"),
    ],
)
async def test_a_bad_version_is_taken_back_before_any_client_sees_it(
    served: Served, scale: float, probe: float | None, why: str
) -> None:
    bad = await served.put("bad", scale, probe=probe)
    task, texts = asyncio.create_task(served.follower.follow()), []
    headers = {"authorization": f"Bearer {served.llm.api_key}"}
    async with httpx.AsyncClient(base_url=served.llm.base_url, headers=headers, timeout=30) as http:

        async def client() -> None:
            while bad.version not in served.follower.refused:
                texts.append(await stream(http))
            texts.append(await stream(http))

        clients = [asyncio.create_task(client()) for _ in range(16)]
        await served.promote(bad.version)
        await asyncio.gather(*clients)
        assert why in served.follower.refused[bad.version]
        assert {word for text in texts for word in text.split()} == {"one"}
        assert {call.version for call in await served.calls()} == {1}
        assert served.policy.loaded == [bad.version, 1], "it is not tried again and again"
        good = await served.put("good", probe=-0.5)
        await served.promote(good.version)
        await served.until(good.version)
        assert set((await stream(http)).split()) == {"good"}
    task.cancel()


async def test_an_answer_is_found_behind_conversations_that_are_being_answered(served: Served) -> None:
    """As many as there are clients have begun since, and have no call yet."""
    headers = {"authorization": f"Bearer {served.llm.api_key}"}
    async with httpx.AsyncClient(base_url=served.llm.base_url, headers=headers, timeout=30) as http:
        await stream(http)
    (answered,) = await served.calls()
    (run,) = [run for run in await served.store.list_runs() if run.name == "clients"]
    await served.store.create_rollouts([Rollout(f"later-{n}", run.id, Task("x"), run.id) for n in range(64)])
    assert len(await served.store.lease(run.id, "clients", limit=64, ttl=60.0)) == 64
    served.follower.current = await served.put("by hand")
    assert await served.follower._known_tokens() == (*answered.prompt_ids, *answered.response_ids)


async def test_one_that_cannot_be_put_back_ends_the_server(served: Served) -> None:
    bad = await served.put("bad", 10.0)
    real = served.policy.update

    async def update(weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> Update:
        served.policy.torn = version == 1
        return await real(weights, version, probes)

    served.policy.update = update  # type: ignore[method-assign]
    await served.promote(bad.version)
    with pytest.raises(PolicyServerError, match="could not be put back"):
        await served.follower.follow()


async def test_files_that_were_changed_are_not_loaded(served: Served) -> None:
    changed = await served.put("changed", probe=-0.5)
    (served.folder / "changed" / "model.json").write_text("{}")
    assert await served.follower.take(changed)
    assert "overwritten" in served.follower.refused[changed.version]
    assert served.policy.loaded == []


async def test_a_version_waits_for_calls_that_do_not_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "DRAIN_SECONDS", 0.05)
    served.policy.fake.script = lambda body: Reply("slow slow", token_delay=0.2)
    headers = {"authorization": f"Bearer {served.llm.api_key}"}
    async with httpx.AsyncClient(base_url=served.llm.base_url, headers=headers, timeout=30) as http:
        call = asyncio.create_task(stream(http))
        while not served.policy.fake.requests:
            await asyncio.sleep(0.005)
        new = await served.put("new", probe=-0.5)
        assert not await served.follower.take(new)
        assert served.policy.loaded == []
        assert await call
        assert await served.follower.take(new)
    assert served.follower.current.version == new.version


async def test_rewards_are_told_by_version(served: Served) -> None:
    headers = {"authorization": f"Bearer {served.llm.api_key}"}
    async with httpx.AsyncClient(base_url=served.llm.base_url, headers=headers, timeout=30) as http:
        for version, reward in ((1, 0.25), (2, 0.75)):
            if version == 2:
                await served.follower.take(await served.put("two", probe=-0.5))
            body = {"model": "policy", "messages": [{"role": "user", "content": "Go"}]}
            response = (await http.post("/chat/completions", json=body)).json()["id"]
            rated = await http.post("/feedback", json={"response_id": response, "reward": reward})
            assert rated.status_code == 200
    uses = {use.version: use.reward for use in await resource_uses(served.store, WEIGHTS_NAME) if use.scored}
    assert uses == {1: 0.25, 2: 0.75}
