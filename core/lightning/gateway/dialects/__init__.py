"""The API shapes the gateway speaks: OpenAI's chat and completions, and those that plugins register."""

from lightning.gateway.dialects.base import Capture, Choice, Dialect, Plan, Translator, offered_tools, refuse_parameter
from lightning.gateway.dialects.completions import Chat, Completions, strip_reasoning

__all__ = [
    "Capture", "Chat", "Choice", "Completions", "Dialect", "Plan", "Translator", "offered_tools", "refuse_parameter",
    "strip_reasoning",
]  # fmt: skip
