"""Weights over the network come from verl's first worker."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, EngineError, PolicyServerError
from lightning_verl.sender import FirstWorker


def test_the_verl_engines_sender_is_its_first_worker(tmp_path: Path) -> None:
    asked: list[Any] = []

    def call(method: str, *arguments: object) -> tuple[Any, str]:
        asked.append((method, *arguments))
        if method == "join":
            raise EngineError("resume the run")
        return "word", "the disk is full" if method == "send" else ""

    config = with_settings(Config(), {"engine.device": "cpu", "engine.verl.world_size": 0}).engine
    sender = FirstWorker(call, threading.Lock(), config)
    sender.check("gloo")
    with pytest.raises(ConfigError, match="needs a CUDA device for verl's workers"):
        sender.check("nccl")
    assert sender.group() == "word"
    with pytest.raises(PolicyServerError, match="verl's first worker: the disk is full"):
        sender.send([tmp_path / "file"])
    with pytest.raises(PolicyServerError, match="verl's workers, which send the weights, are gone: resume the run"):
        sender.join("word")
    assert asked == [("group",), ("send", [tmp_path / "file"]), ("join", "word")]
