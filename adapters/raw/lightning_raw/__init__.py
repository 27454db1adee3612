"""Adapter for agents in plain Python: names the caller by `lightning.component`, else by the functions on the stack.

The invariant: it only looks, it never changes what the agent does; and it answers last, so a framework's adapter wins.
It has no `lightning_install`, since there is nothing to attach to: `@lightning.tool` reports its own runs.
"""

from __future__ import annotations

import lightning
from lightning.instrument import by_type, component_path, user_functions

__all__ = ["lightning_identify"]


POLICY_FAULTS = {"openai.LengthFinishReasonError": "cut_off"}
"""Exceptions that tell of the model's own fault, by package and class; see `lightning_policy_fault`."""


@lightning.hookimpl(trylast=True)
def lightning_identify() -> lightning.Caller | None:
    """The innermost component; without any, the nearest function of the user's own code. None if there is neither."""
    path = component_path() or user_functions(above=2)
    return lightning.Caller(agent=path[-1], path=path, framework="raw") if path else None


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """What the OpenAI client's exceptions tell of the model."""
    return by_type(error, POLICY_FAULTS)
