"""A pytest plugin for tests of agents and adapters. It is off until a test suite asks for it:

    pytest_plugins = ["lightning.testing.pytest_plugin"]        # in the top conftest.py

or `pytest -p lightning.testing.pytest_plugin`, for one run.

`AdapterContract` does not need it: its tests hold the network by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning.testing.chat_server import ChatServer
from lightning.testing.network import hold_network

__all__ = ["chat_server", "loopback_only", "pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--loopback-only`, which holds the network for every test of the run."""
    parser.addoption(
        "--loopback-only", action="store_true", help="refuse connections beyond the loopback address, and fail the test"
    )


@pytest.fixture
def loopback_only() -> Iterator[list[str]]:
    """Hold the network to the loopback address. The list has the refused hosts; any that is left in it fails the test."""
    with hold_network() as refused:
        yield refused
    if refused:
        pytest.fail(f"the test, or something it started, wanted to reach {', '.join(refused)}", pytrace=False)


@pytest.fixture(autouse=True)
def _loopback_option(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--loopback-only"):
        request.getfixturevalue("loopback_only")


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    """A chat server with canned answers: give `chat_server.llm()` to an agent, read `chat_server.calls`."""
    with ChatServer() as server:
        yield server
