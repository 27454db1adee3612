"""What the first rollout has built the fork server builds for the others: each has its own, as it would have built it."""

from __future__ import annotations

import importlib
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import certifi
import pydantic
import pytest
from lightning.config import RunnerConfig
from lightning.runner.process import ProcessRunner
from lightning.runner.warmth import Contexts, Stores, build_model, built_models
from lightning.types import LLM, Lease, Rollout, Task

NOWHERE = LLM("http://127.0.0.1:9/v1", "key", "policy")


AGENT = """
import ssl

import certifi
import pydantic

class Deferred(pydantic.BaseModel, defer_build=True):
    number: int

def agent(task, llm):
    built, make = Deferred.__pydantic_complete__, ssl.create_default_context
    waiting = sum(map(len, make._made.values()))
    one, other = make(cafile=certifi.where()), make(cafile=certifi.where())
    assert one is not other
    assert one.cert_store_stats()["x509"] > 50
    Deferred(number=1)
    return {"built": built, "waiting": waiting, "verified": one.verify_mode is ssl.CERT_REQUIRED and one.check_hostname}
"""


class Deferred(pydantic.BaseModel, defer_build=True):
    """Built when it is first used."""

    number: int


class AtOnce(pydantic.BaseModel):
    """Built with its class."""

    number: int


async def test_later_processes_have_it_and_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent_that_builds.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    module = importlib.import_module("agent_that_builds")
    runner = ProcessRunner(module.agent, RunnerConfig(concurrency=1, timeout=60))
    await runner.start()
    found = []
    try:
        for number in range(40):
            lease = Lease(Rollout(str(number), "run", Task(number), "g", attempt=1), "w", 0.0)
            outcome = await runner.run(lease, NOWHERE)
            assert outcome.error == ""
            found.append((outcome.rewards["built"], outcome.rewards["waiting"], outcome.rewards["verified"]))
            if len(found) > 2 and found[-1][0] == found[-2][0] == 1:
                break
    finally:
        await runner.close()
        sys.modules.pop("agent_that_builds", None)
    assert found[0] == (0, 0, 1)
    assert found[-1] == found[-2] == (1, 2, 1)


@pytest.fixture
def contexts() -> Iterator[Contexts]:
    real = ssl.create_default_context
    yield Contexts()
    ssl.create_default_context = real


def test_each_context_is_handed_out_once_and_others_are_made(contexts: Contexts) -> None:
    stores = Stores.of(ssl.Purpose.SERVER_AUTH, certifi.where(), None, None)
    assert stores is not None
    contexts.make(stores, 1)
    (made,) = contexts._made[stores]
    contexts.install()
    assert ssl.create_default_context(cafile=certifi.where()) is made
    assert ssl.create_default_context(cafile=certifi.where()) is not made
    assert contexts.told() == [
        {"stores": {"cafile": certifi.where(), "capath": "", "changed": stores.changed}, "count": 2}
    ]


def test_what_depends_on_more_than_files_is_never_made_in_advance(
    contexts: Contexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(Path(certifi.where()).read_bytes())
    stores = Stores.of(ssl.Purpose.SERVER_AUTH, str(file), None, None)
    assert stores is not None
    contexts.make(stores, 8)
    os.utime(file, ns=(1, 1))
    made = contexts._made[stores]
    assert contexts(cafile=str(file)) not in made, "the file has changed"
    assert contexts(ssl.Purpose.CLIENT_AUTH, cafile=str(file)) not in made
    assert contexts(
        cafile=str(file), cadata=ssl.DER_cert_to_PEM_cert(ssl.create_default_context().get_ca_certs(True)[0])
    )
    with pytest.raises(FileNotFoundError):
        contexts(cafile=str(tmp_path / "none.pem"))
    contexts()
    assert [asked.changed for asked in contexts.asked] == [1]
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    assert Stores.of(ssl.Purpose.SERVER_AUTH, str(file), None, None) is None


def test_models_that_were_built_late_are_told_by_name() -> None:
    name = [Deferred.__module__, "Deferred"]
    if not Deferred.__pydantic_complete__:
        assert name not in built_models()
    build_model(*name)
    assert name in built_models()
    assert [AtOnce.__module__, "AtOnce"] not in built_models()
