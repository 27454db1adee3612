"""The API shapes the gateway speaks. A new one is a module here and a line in `DIALECTS`."""

from lightning.gateway.dialects.base import Capture, Choice, Dialect, Plan, offered_tools
from lightning.gateway.dialects.completions import Chat, Completions
from lightning.gateway.dialects.messages import Messages
from lightning.gateway.dialects.responses import Responses
from lightning.gateway.dialects.translated import Translator

DIALECTS: tuple[type[Dialect], ...] = (Chat, Completions, Responses, Messages)

__all__ = ["DIALECTS", "Capture", "Choice", "Dialect", "Messages", "Plan", "Responses", "Translator", "offered_tools"]
