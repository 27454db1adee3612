"""Which agent framework makes a call that no adapter names: one that has no adapter here.

The invariant: it only looks at the stack, and only where such a framework is imported. Its calls belong to whatever code of
the user's is around them, and nobody would notice that its agents have no names.
"""

from __future__ import annotations

import sys
from typing import Final

NO_ADAPTER: Final = "no-adapter:"
"""What `Caller.framework` begins with, before the framework's module, in a call that a framework without adapter makes."""
FRAMEWORKS: Final = (
    "agent_framework",
    "agno",
    "camel",
    "crewai",
    "dspy",
    "google.adk",
    "haystack",
    "llama_index",
    "pydantic_ai",
    "semantic_kernel",
    "smolagents",
    "strands",
)
"""Modules of frameworks with agents or tools of their own, for which an adapter may be missing or not attached."""


def attached_adapters() -> set[str]:
    """The adapters that are attached to their frameworks: each reports the tools of its framework itself."""
    from lightning.plugins import plugins

    return plugins().attached()


def without_adapter() -> str:
    """The framework without adapter whose code makes the running call; empty where there is none."""
    imported = tuple(name for name in FRAMEWORKS if name in sys.modules)
    if not imported:
        return ""
    from lightning.plugins import plugins

    attached = attached_adapters()
    adapted = {info.waits_for.partition(".")[0] for info in plugins().adapters() if info.name in attached}
    missing = [name for name in imported if name.partition(".")[0] not in adapted]
    frame = sys._getframe(1) if missing else None  # noqa: SLF001 — the one way to the stack that builds no list of all frames
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        for name in missing:
            if module == name or module.startswith(f"{name}."):
                return name
        frame = frame.f_back
    return ""


def framework_without_adapter(framework: str) -> str:
    """What `Caller.framework` says of it; empty for any other caller."""
    return framework.removeprefix(NO_ADAPTER) if framework.startswith(NO_ADAPTER) else ""
