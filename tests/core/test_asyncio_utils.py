"""What a signal does to the main task."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
from lightning.asyncio_utils import end_process, unless, until_told


def send(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_cancels_and_what_is_tidied_up_comes_first() -> None:
    done: list[str] = []

    async def main() -> None:
        try:
            send()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            done.append("tidied up")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(until_told(main(), signal.SIGTERM))
    assert done == ["tidied up"]


def test_with_an_event_the_first_signal_only_asks() -> None:
    async def main(stop: asyncio.Event) -> str:
        send(signal.SIGINT)
        await stop.wait()
        return "ended by itself"

    async def told() -> str:
        stop = asyncio.Event()
        return await until_told(main(stop), signal.SIGTERM, signal.SIGINT, gently=stop)

    assert asyncio.run(told()) == "ended by itself"


def test_with_an_event_the_second_signal_cancels() -> None:
    async def main(stop: asyncio.Event) -> None:
        send()
        await stop.wait()
        send()
        await asyncio.Event().wait()

    async def told() -> None:
        stop = asyncio.Event()
        await until_told(main(stop), signal.SIGTERM, gently=stop)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(told())


def test_another_cancellation_is_no_signal() -> None:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(until_told(main(), signal.SIGTERM))


HOLDS = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print(child.pid, file=sys.stderr, flush=True)\n"
    "time.sleep(600)\n"
)
"""A program whose child holds its standard error open, in a session of its own."""


async def test_a_process_that_is_given_up_leaves_no_transport() -> None:
    """It would be collected in the middle of a later test, and blamed on that."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLDS, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    child = int(await process.stderr.readline())
    try:
        await end_process(process)
        assert (process.returncode, process._transport.is_closing()) == (-9, True)  # type: ignore[attr-defined]
        await end_process(process)  # one that has ended is let go of as well
    finally:
        os.kill(child, signal.SIGKILL)


async def test_what_is_done_first_is_the_answer_and_errors_come_through() -> None:
    async def failing() -> None:
        raise ValueError("said")

    over = asyncio.Event()
    assert await unless(asyncio.sleep(0, "done"), over.wait()) == "done"
    with pytest.raises(ValueError, match="said"):
        await unless(failing(), over.wait())


async def test_what_is_given_up_has_tidied_up_before_none_is_returned() -> None:
    tidied: list[str] = []

    async def doing() -> str:
        try:
            return await asyncio.sleep(600, "done")
        finally:
            await asyncio.sleep(0)
            tidied.append("tidied up")

    assert await unless(doing(), asyncio.sleep(0.01)) is None
    assert tidied == ["tidied up"]


async def test_a_second_cancellation_leaves_no_listener_behind() -> None:
    listening, cleaning, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def doing() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cleaning.set()
            await asyncio.sleep(600)

    async def listen() -> None:
        listening.set()
        try:
            await asyncio.Event().wait()
        finally:
            over.set()

    task = asyncio.create_task(unless(doing(), listen()))
    await listening.wait()
    task.cancel()
    await cleaning.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await asyncio.wait_for(over.wait(), 30)
