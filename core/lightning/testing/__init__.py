"""For tests of agents and plugins: the adapters' conformance kit, a scripted vLLM, a chat server, tiny models.

Everything is imported when it is first used: only `AdapterContract` needs pytest, and only the tiny models need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightning.errors import MissingExtraError

if TYPE_CHECKING:
    from lightning.testing.adapter_contract import AdapterContract
    from lightning.testing.chat_server import ChatServer
    from lightning.testing.fake_vllm import FakeVLLM, Reply, ToolCall
    from lightning.testing.network import NetworkHeldError, hold_network

__all__ = ["AdapterContract", "ChatServer", "FakeVLLM", "NetworkHeldError", "Reply", "ToolCall", "hold_network"]

_HOME = {
    "AdapterContract": "adapter_contract",
    "ChatServer": "chat_server",
    "FakeVLLM": "fake_vllm",
    "NetworkHeldError": "network",
    "Reply": "fake_vllm",
    "ToolCall": "fake_vllm",
    "hold_network": "network",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'lightning.testing' has no attribute {name!r}")
    try:
        value: object = getattr(importlib.import_module(f"lightning.testing.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise MissingExtraError("testing", "pytest") from error
    globals()[name] = value
    return value
