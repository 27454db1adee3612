"""The API shapes the gateway speaks. A new one is a module here and a line in `DIALECTS`."""

from lightning.gateway.dialects.base import Capture, Choice, Dialect, Plan
from lightning.gateway.dialects.chat import Chat
from lightning.gateway.dialects.completions import Completions

DIALECTS: tuple[Dialect, ...] = (Chat(), Completions())

__all__ = ["DIALECTS", "Capture", "Chat", "Choice", "Completions", "Dialect", "Plan"]
