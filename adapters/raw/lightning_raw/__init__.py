"""Adapter for agents in plain Python: names the caller by `lightning.component`, else by the functions on the stack.

The invariant: it only looks and never changes what the agent does; it is asked last, so that a framework's adapter wins. It has
no `lightning_install`, since there is nothing to attach to: `@lightning.tool` reports its own runs.
"""

from __future__ import annotations

import lightning
from lightning.instrument import by_type, component_path, user_functions

__all__ = ["lightning_identify"]


POLICY_FAULTS = {"openai.LengthFinishReasonError": "cut_off"}
"""Exceptions that mean a fault of the model, by package and class; see `lightning_policy_fault`."""


@lightning.hookimpl(trylast=True)
def lightning_identify() -> lightning.Caller | None:
    """Name the innermost component, or without any the nearest function of the user's own code. None if there is neither."""
    path = component_path() or user_functions(above=2)
    return lightning.Caller(agent=path[-1], path=path, framework="raw") if path else None


@lightning.hookimpl
def lightning_policy_fault(error: BaseException) -> str | None:
    """Name the model's fault that an exception of the OpenAI client means; None for others."""
    return by_type(error, POLICY_FAULTS)
