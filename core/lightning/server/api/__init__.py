"""The control API: every noun of the store over HTTP, for whoever has a token.

The invariant: see `lightning.server.api.app` for what a request goes through, and `lightning.server.api.table` for what a
route is.
"""

from lightning.server.api.app import Api, Limits, description, routes
from lightning.server.api.table import PREFIX, Finish, LlmFor

__all__ = ["PREFIX", "Api", "Finish", "Limits", "LlmFor", "description", "routes"]
