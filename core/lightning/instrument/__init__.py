"""Instrumentation of the agent's process: it names the callers of the model and reports tool runs, step rewards and states.

The invariant: nothing here can break an agent, and outside a rollout everything here does nothing.
"""

from __future__ import annotations

from lightning.instrument.adapter_tools import (
    ActiveScope,
    Attachment,
    FrameworkAdapter,
    Installations,
    ReplacedMethods,
    Scopes,
    by_type,
    check_supported,
    in_words,
    replace_method,
)
from lightning.instrument.clients import MarkedRequest, install_tap, mark_request
from lightning.instrument.components import ask, component, component_path, current_caller, tool, untrained
from lightning.instrument.context import ActiveAttempt, activate, current_attempt, emit, label, reject, reward, state
from lightning.instrument.frames import user_functions
from lightning.instrument.marking import attached_adapters
from lightning.instrument.tool_slots import ToolSlot, hold_slots, set_slots, tool_slot

__all__ = [
    "ActiveAttempt",
    "ActiveScope",
    "Attachment",
    "FrameworkAdapter",
    "Installations",
    "MarkedRequest",
    "ReplacedMethods",
    "Scopes",
    "ToolSlot",
    "activate",
    "ask",
    "attached_adapters",
    "by_type",
    "check_supported",
    "component",
    "component_path",
    "current_attempt",
    "current_caller",
    "emit",
    "hold_slots",
    "in_words",
    "install_tap",
    "label",
    "mark_request",
    "reject",
    "replace_method",
    "reward",
    "set_slots",
    "state",
    "tool",
    "tool_slot",
    "untrained",
    "user_functions",
]
