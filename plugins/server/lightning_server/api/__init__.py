"""The control API: every noun of the store over HTTP, for whoever has a token.

The invariant: see `lightning_server.api.app` for what a request goes through, and `lightning_server.api.table` for what a
route is.
"""

from lightning_server.api.app import Api, Limits, description, routes
from lightning_server.api.table import PREFIX, Finish, LlmFor

__all__ = ["PREFIX", "Api", "Finish", "Limits", "LlmFor", "description", "routes"]
