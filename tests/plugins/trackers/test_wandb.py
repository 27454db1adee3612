"""The tracker `wandb` against the real library, without a server: what it would send is read back from the run's file."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.plugins.trackers.conftest import SECRET, Tell

BLOCK: Final = 32_768

NO_SERVER = """
import pathlib, sys, time
from lightning.config import Config
from lightning.store.memory import MemoryStore
from lightning.tracking.trackers import Trackers
with Trackers(["wandb", "jsonl"], Config(), run="run", folder=pathlib.Path(sys.argv[1]), store=MemoryStore()) as held:
    held.log(0, {"reward": 0.5})
"""


async def written(file: Path) -> list[Any]:
    """The records of a run that has ended: W&B's own process writes the last ones a moment after it said so."""
    async with asyncio.timeout(30):
        while not kept("exit", found := records(file)):
            await asyncio.sleep(0.02)
    return found


def records(file: Path) -> list[Any]:
    """What W&B keeps to send: records of protobuf in the blocks of a LevelDB log, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (room := BLOCK - at % BLOCK) < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            break  # it is being written
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(part))
            part = b""
    return found


def kept(kind: str, found: list[Any]) -> list[Any]:
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


async def test_a_run_is_in_wandbs_file_and_a_resumed_one_has_its_id(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    await asyncio.to_thread(tell, "wandb")
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    found = await written(file)
    (run,) = kept("run", found)
    assert (run.project, run.display_name, run.run_id[:4]) == ("lightning", "run", "run-")
    settings = {item.key: json.loads(item.value_json) for config in kept("config", found) for item in config.update}
    assert (settings["model"], settings["trainer"]["steps"]) == ("tiny", 8)
    assert settings["runner"]["k8s"]["env"] == {"PLACE": "[redacted]"}
    assert SECRET.encode() not in file.read_bytes()
    (row,) = kept("history", found)
    values = {"/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
    assert (values["step"], values["reward"], values["reward/f1"]) == (3, 0.5, 0.75)
    assert "loss" not in values, "a curve has no place for what is no number"
    assert [metric.step_metric for metric in kept("metric", found) if metric.glob_name == "*"] == ["step"]
    (alert,) = kept("alert", found)
    assert (alert.title, alert.text, alert.level) == ("run: collapsed", "step 3: the reward collapsed", "WARN")
    table = json.loads((folder / "files" / values["rollouts/path"]).read_text())
    assert [dict(zip(table["columns"], line, strict=True)) for line in table["data"]] == [
        {
            "step": 3,
            "split": "train",
            "rollout": "r",
            "attempt": 1,
            "task": "task-1",
            "status": "succeeded",
            "reward": 0.5,
            "error": "",
            "tokens": 4,
            "input": "2 + 2?",
            "answer": "It is 4.",
        }
    ]

    await asyncio.sleep(1)  # W&B names the folder of a start by its second
    await asyncio.to_thread(tell, "wandb", step=4, steps=9)
    again = [name for name in (tmp_path / "run" / "wandb").rglob("*.wandb") if name != file]
    assert [kept("run", await written(name))[0].run_id for name in again] == [run.run_id]


@pytest.mark.slow
@pytest.mark.parametrize(("key", "said"), [("", "there is no API key"), ("a" * 40, "did not begin the run")])
def test_without_a_login_or_a_server_one_line_says_what_helps(tmp_path: Path, key: str, said: str) -> None:
    away = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    away |= {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2"}
    away |= {"WANDB_API_KEY": key} if key else {}
    ended = subprocess.run(
        [sys.executable, "-c", NO_SERVER, str(tmp_path)], env=away, capture_output=True, text=True, check=True
    )
    lines = [line for line in ended.stderr.splitlines() if "the tracker 'wandb'" in line]
    assert len(lines) == 1, ended.stderr
    assert said in lines[0]
    assert "WANDB_MODE=offline" in lines[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
