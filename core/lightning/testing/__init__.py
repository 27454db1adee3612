"""Help for tests of agents and plugins: the adapters' conformance kit, a check of what a plugin imports, a scripted vLLM, a
chat server, tiny models, and small decision tasks that score credit functions.

Each name is imported when it is first used: only `AdapterContract` needs pytest, and only the tiny models need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightning.errors import MissingExtraError

if TYPE_CHECKING:
    from lightning_branching.fixture import replayed

    from lightning.testing.adapter_contract import AdapterContract
    from lightning.testing.chat_server import ChatServer
    from lightning.testing.contract_script import ReplyFormat
    from lightning.testing.decisions import (
        Action,
        ActionOutcome,
        CreditScore,
        Decision,
        DecisionTask,
        TreeSampling,
        bifurcation_tasks,
        score_credit,
        score_credits,
    )
    from lightning.testing.fake_vllm import FakeVLLM, Reply, ToolCall
    from lightning.testing.network import NetworkHeldError, hold_network
    from lightning.testing.one_rollout import RolloutRecord, rollout
    from lightning.testing.public_imports import check_imports
    from lightning.testing.trajectories import make_call, make_group, make_trajectory

__all__ = [
    "Action",
    "ActionOutcome",
    "AdapterContract",
    "ChatServer",
    "CreditScore",
    "Decision",
    "DecisionTask",
    "FakeVLLM",
    "NetworkHeldError",
    "Reply",
    "ReplyFormat",
    "RolloutRecord",
    "ToolCall",
    "TreeSampling",
    "bifurcation_tasks",
    "check_imports",
    "hold_network",
    "make_call",
    "make_group",
    "make_trajectory",
    "replayed",
    "rollout",
    "score_credit",
    "score_credits",
]

_HOME = {
    "Action": "decisions",
    "AdapterContract": "adapter_contract",
    "TreeSampling": "decisions",
    "ChatServer": "chat_server",
    "CreditScore": "decisions",
    "Decision": "decisions",
    "DecisionTask": "decisions",
    "FakeVLLM": "fake_vllm",
    "NetworkHeldError": "network",
    "ActionOutcome": "decisions",
    "Reply": "fake_vllm",
    "ReplyFormat": "contract_script",
    "RolloutRecord": "one_rollout",
    "ToolCall": "fake_vllm",
    "bifurcation_tasks": "decisions",
    "check_imports": "public_imports",
    "hold_network": "network",
    "make_call": "trajectories",
    "make_group": "trajectories",
    "make_trajectory": "trajectories",
    "replayed": "lightning_branching.fixture",
    "rollout": "one_rollout",
    "score_credit": "decisions",
    "score_credits": "decisions",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'lightning.testing' has no attribute {name!r}")
    try:
        place = home if "." in home else f"lightning.testing.{home}"
        value: object = getattr(importlib.import_module(place), name)
    except ModuleNotFoundError as error:
        if error.name == "pytest":
            raise MissingExtraError("testing", "pytest") from error
        if error.name == "lightning_branching":
            raise MissingExtraError("branching", "lightning_branching") from error
        raise
    globals()[name] = value
    return value
