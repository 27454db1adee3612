"""What every test may use: throw-away distributions, the warnings that were logged, one real vLLM for all."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import logging
import os
import re
import signal
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from lightning.plugins import plugins

Install = Callable[..., Path]

# No test has a deadline: a busy machine is not a fault. `LIGHTNING_TEST_EXAMPLES=1000 make test-fast` looks harder.
settings.register_profile("house", deadline=None, max_examples=int(os.environ.get("LIGHTNING_TEST_EXAMPLES", "30")))
settings.load_profile("house")

# Every client of `openai`, `anthropic` or `httpx` loads the certificate store anew (30 ms of CPU), and no test speaks TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# A shell starts what it puts into the background deaf to Ctrl-C, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests attach to vLLMs that other tests, or they themselves, have started.
os.environ.setdefault("LIGHTNING_VLLM_SECRET", "the secret of every vLLM in these tests")

FRAMEWORKS = (
    "adapters/autogen/", "adapters/langchain/", "adapters/openai_agents/", "adapters/otel/test_contract.py",
    "adapters/otel/test_provider.py",
    "core/gateway/test_framework_clients.py", "examples/test_math_", "examples/test_paper_agents", "examples/test_rag_",
    "examples/test_sql_",
    "plugins/branching/test_branch_frameworks.py", "plugins/branching/test_replay_clients.py",
    "plugins/branching/test_replay_frameworks.py",
)  # fmt: skip
"""Tests that import an agent framework, which takes seconds: `make test-frameworks`."""


ELSEWHERE = (
    "adapters/crewai/", "adapters/dspy/", "adapters/llama_index/", "adapters/smolagents/", "adapters/pages/",
    "plugins/deploy/test_sky_validator.py",
)  # fmt: skip
"""Tests of frameworks that cannot live beside the others, in an environment of their own: `make test-frameworks`."""


def needs_framework(path: Path) -> bool:
    """Whether a file of tests imports an agent framework."""
    return _below(path, FRAMEWORKS)


def runs_elsewhere(path: Path) -> bool:
    """Whether a file of tests imports a framework that only the environment for these has."""
    return _below(path, ELSEWHERE)


def _below(path: Path, places: tuple[str, ...]) -> bool:
    root = Path(__file__).parent
    return path.is_relative_to(root) and str(path.relative_to(root)).startswith(places)


SLOW = ("slow", "slow and not long", "long")
"""What is selected of the slow tests: all, those of `make test-slow`, those of `make test-long`."""
STORES = "tests.servers.stores"
"""Fixtures of which some have slow parameters, imported by several `conftest.py`."""


@functools.cache
def may_be_slow(path: Path) -> bool:
    """Whether a file of tests, or a `conftest.py` whose fixtures it has, speaks of slow ones."""
    folders = [folder for folder in path.parents if folder.is_relative_to(Path(__file__).parent)][:-1]
    places = [path, *(folder / "conftest.py" for folder in folders)]
    texts = [place.read_text() for place in places if place.exists()]
    return any("mark.slow" in text or STORES in text for text in texts)


@functools.cache
def has_long(path: Path) -> bool:
    """Whether a file of tests has any that only `make test-long` runs."""
    return "mark.long" in path.read_text()


@functools.cache
def is_slow(path: Path) -> bool:
    """Whether all tests of a file are."""
    return re.search(r"^pytestmark = .*mark\.slow\b", path.read_text(), re.MULTILINE) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what the marker expression leaves out: importing is what takes the time."""
    if collection_path.suffix != ".py":
        # A folder's conftest.py would be imported before any of its files is asked for.
        return True if runs_elsewhere(collection_path / "conftest.py") and find_spec("crewai") is None else None
    wanted, needs = config.option.markexpr, needs_framework(collection_path)
    if runs_elsewhere(collection_path) or wanted == "elsewhere":
        fits = runs_elsewhere(collection_path) and wanted in ("", "elsewhere") and find_spec("crewai") is not None
        return None if fits or collection_path.name == "conftest.py" else True
    return (
        (wanted in SLOW and not may_be_slow(collection_path))
        or (wanted == "long" and not has_long(collection_path))
        or ("not slow" in wanted and is_slow(collection_path))
        or ("not framework" in wanted and needs)
        or (wanted.startswith("framework") and not needs)
        or None
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays until the end: nobody looks through it for garbage, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell those that need a framework from the fast ones; the longest of the slow ones first."""
    for item in items:
        if item.get_closest_marker("framework") and not needs_framework(item.path):
            raise pytest.UsageError(
                f"{item.nodeid} imports a framework, and no suite runs it: name its file in FRAMEWORKS"
            )
        if needs_framework(item.path):
            item.add_marker(pytest.mark.framework)
        if runs_elsewhere(item.path):
            item.add_marker(pytest.mark.elsewhere)
        if item.get_closest_marker("slow") and not may_be_slow(item.path):
            raise pytest.UsageError(f"{item.nodeid} is slow, and `make test-slow` will not find it: say so in its file")
        if item.get_closest_marker("long") and not item.get_closest_marker("slow"):
            raise pytest.UsageError(f"{item.nodeid} is long, and `make test-fast` would run it: mark it slow as well")
    if config.option.markexpr in SLOW:
        items.sort(key=_turn)


SHARING = (
    "tests/adapters/test_quickstarts.py",
    "tests/bench/test_smallest.py::test_sampling_reaches_a_real_vllm",
    "tests/core/gateway/test_real_",
    "tests/plugins/attach/test_real_vllm.py",
    "tests/plugins/branching/test_branch_real.py",
    "tests/plugins/debug/test_call_advice.py",
    "tests/plugins/dialects/test_real_completions.py",
    "tests/core/policy_server/test_vllm.py",
)
"""Tests that use the one real vLLM (`served`) and therefore run in one worker; last those that kill the server for good."""
APART = ("tests/e2e/test_many_machines.py", "tests/e2e/test_survival.py", "tests/house/test_docs_run.py")
"""Tests that share nothing with their neighbours."""
LONGEST = (
    "tests/e2e/test_survival.py",
    "tests/chaos/",
    *SHARING,
    "tests/house/test_docs_run.py::test_slow_blocks_run_with_one_vllm[docs/your-own-loop.md]",
    "tests/house/test_docs_run.py::test_slow_blocks_run[README.md]",
    "tests/house/test_docs_run.py::test_slow_blocks_run[docs/replay.md]",
    "tests/e2e/test_many_machines.py::test_a_real_training",
    "tests/e2e/",
)
"""Slow tests of a minute and more, which begin first, so that no worker ends long after the others."""


def _turn(item: pytest.Item) -> int:
    return next((turn for turn, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Slow tests by what they share: a server, else what the fixtures of their file started."""
    if config.option.markexpr not in SLOW:
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByWhatIsShared(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(APART):
                return nodeid
            return "served" if nodeid.startswith(SHARING) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # xdist's own order: what has the most tests first
    return ByWhatIsShared(config, log)


@pytest.fixture(scope="session", autouse=True)
def _look_for_plugins_first() -> None:
    """The process's plugins are found before a test changes the environment or installs one, which is looked for once."""
    _look_for_plugins()


def _look_for_plugins() -> None:
    plugins().plugins()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution that exists for one test: `install("name", {"plugin": "module"}, {"module": source})`.

    It is found exactly as an installed one is: by its metadata in a folder on `sys.path`.
    """
    made: set[str] = set()

    def install(
        name: str,
        entry_points: Mapping[str, str] | None = None,
        modules: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
        requires: str = "",
    ) -> Path:
        folder = tmp_path / "site" / name
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        lines = [f"{key} = {value}" for key, value in (entry_points or {}).items()]
        (info / "entry_points.txt").write_text("\n".join(["[lightning]", *lines, ""]))
        for module, source in (modules or {}).items():
            file = folder / f"{module.replace('.', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
            made.add(module.partition(".")[0])
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        return folder

    yield install
    if any(info.target.partition(".")[0] in made for info in plugins().plugins()):
        plugins.cache_clear()  # the process has looked for its plugins meanwhile, and would keep the test's
        _look_for_plugins()
    for module in [module for module in sys.modules if module.partition(".")[0] in made]:
        del sys.modules[module]


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings and errors that were logged so far."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture(scope="module")
def interruptible() -> Iterator[None]:
    """Processes that the test starts hear Ctrl-C, also where the tests were started with it ignored (by `&` in a script)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class RealVLLM:
    """A real vLLM on the CPU with a tiny untied model, and two policies for it: `first`, `second`."""

    def __init__(self, root: Path) -> None:
        from lightning.config.sections import PolicyServerConfig
        from lightning.policy_server.vllm_server import OwnedVLLM
        from lightning.testing.tiny_models import make_tiny_model

        self.first = make_tiny_model(root / "first", seed=0)
        self.second = make_tiny_model(root / "second", seed=1)
        self.log = root / "vllm.log"
        config = PolicyServerConfig(device="cpu", args=("--enable-prompt-tokens-details",))
        self.vllm = OwnedVLLM(self.first, config, log=self.log, version=10)

    async def use(self, folder: Path) -> None:
        """Serve a folder's weights as the next version; start it again if a test has killed it."""
        weights, version = folder / "model.safetensors", self.vllm.version + 1
        if await self.vllm.healthy():
            await self.vllm.update(weights, version)
        else:
            await self.vllm.restart(weights, version)


@pytest.fixture(scope="session")
def real_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVLLM]:
    """One for all slow tests of this worker process: a start takes longer than most tests. Say first what to `use`."""
    real = RealVLLM(tmp_path_factory.mktemp("real-vllm"))
    asyncio.run(real.vllm.start())
    yield real
    asyncio.run(real.vllm.close())


@pytest.fixture
async def served(real_vllm: RealVLLM) -> RealVLLM:
    """It, serving its first policy."""
    await real_vllm.use(real_vllm.first)
    return real_vllm


# Servers of which one serves all tests of a process. What they need is imported when one is asked for.


@pytest.fixture(scope="session")
def control() -> Iterator[Any]:
    """One server for the clients' views of all stores."""
    from tests.servers.control import ControlServer

    with ControlServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """One for all tests that share it, each in a schema of its own."""
    from tests.servers.postgres import PostgresServer

    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One for all tests that share it, each under a prefix of its own."""
    from tests.servers.redis import RedisServer

    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server
