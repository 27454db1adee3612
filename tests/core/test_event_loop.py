"""What serves runs on the fast loop, and ends as it does on asyncio's."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from lightning import asyncio_utils
from lightning.asyncio_utils import run_to_end, until_told

uvloop = pytest.importorskip("uvloop")


async def kind() -> type[asyncio.AbstractEventLoop]:
    return type(asyncio.get_running_loop())


def test_what_serves_runs_on_uvloop_also_beside_a_notebooks_loop() -> None:
    async def notebook() -> type[asyncio.AbstractEventLoop]:
        return run_to_end(kind())

    assert run_to_end(kind()) is uvloop.Loop
    assert asyncio.run(notebook()) is uvloop.Loop, "in a thread of its own"


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_what_runs_and_ends_as_ctrl_c_does(told: signal.Signals, interruptible: None) -> None:
    ended = []

    async def main() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), told)).start()
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(told)

    with pytest.raises(KeyboardInterrupt):
        asyncio_utils.run(until_told(main(), signal.SIGTERM))
    assert ended == [told]
