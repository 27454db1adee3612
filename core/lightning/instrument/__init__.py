"""What runs inside the agent's process: who is calling, which tool ran, which step was rewarded.

The invariant: nothing here can break an agent, and outside a rollout everything here does nothing.
"""

from __future__ import annotations

from lightning.instrument.components import component, component_path, tool
from lightning.instrument.context import Session, activate, current_session, emit, label, reward
from lightning.instrument.tap import install_tap

__all__ = [
    "Session",
    "activate",
    "component",
    "component_path",
    "current_session",
    "emit",
    "install_tap",
    "label",
    "reward",
    "tool",
]
