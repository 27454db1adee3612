"""`lightning serve`: a model for agents that run somewhere else, and a record of what they asked."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
from lightning.plugins import plugins
from lightning.store.url import sqlite_url
from lightning_examples.raw_python import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def recorded(folder: Path) -> list[tuple[str, int]]:
    """Name of each run and the number of its calls."""
    store = plugins().store(sqlite_url(folder / "lightning.db"))
    await store.open()
    try:
        return [(run.name, len(await store.transitions(f"{run.id}/0"))) for run in await store.list_runs()]
    finally:
        await store.close()


def test_a_served_model_answers_its_key_holder_and_records_the_call(tmp_path: Path) -> None:
    folder, log = tmp_path / "serve", tmp_path / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning", "serve", str(MODEL), "--out", str(folder)], stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + 200
        while not re.search(r"^model: policy$", log.read_text(), re.MULTILINE):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        given = dict(re.findall(r"^export (OPENAI_\w+)=(\S+)$", log.read_text(), re.MULTILINE))
        with openai.OpenAI(base_url=given["OPENAI_BASE_URL"], api_key=given["OPENAI_API_KEY"]) as client:
            messages = [{"role": "user", "content": "Ann has 20 pens. Ann gives away 5. How many pens now?"}]
            reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)  # type: ignore[arg-type]
            assert reply.choices[0].message.content
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="wrong").models.list()
        assert asyncio.run(recorded(folder)) == [("shell", 1)]
    finally:
        process.send_signal(2)
        assert process.wait(60) == 0, log.read_text()
    assert "stopped" in log.read_text()
