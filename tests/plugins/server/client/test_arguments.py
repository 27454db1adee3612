"""What a client is given, and where it is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.errors import ConfigError
from lightning.types import LLM, Task
from lightning_server.client import Client

SEQUENCES: dict[str, Callable[[Any], object]] = {
    "adapters of Client": lambda names: Client("http://127.0.0.1:1", print, adapters=names),
    "runs": lambda names: Client("http://127.0.0.1:1", lambda task, llm: 1.0, runner="inline", runs=names),
}


@pytest.mark.parametrize("what", SEQUENCES)
def test_a_text_in_the_place_of_several_is_refused_by_name(what: str) -> None:
    """Its letters would be globs and names: `*` in `*/writer` trains every agent."""
    with pytest.raises(ConfigError, match=rf"(?s){what.partition(' ')[0]}.*\*/writer"):
        SEQUENCES[what]("*/writer")


async def test_a_client_that_is_run_inside_a_loop_says_what_to_do_instead() -> None:
    async def agent(task: Task, llm: LLM) -> float:
        return 1.0

    client = Client("http://127.0.0.1:9", agent, token="lt_a_b", runner="inline")
    with pytest.raises(RuntimeError, match=r"an event loop runs .* already.*: `await client\.work\(\)`"):
        client.run()
