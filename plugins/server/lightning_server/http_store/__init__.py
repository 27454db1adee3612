"""`HttpStore`: a store over the control API of one or several Lightning Servers."""

from lightning_server.http_store.store import HttpStore

__all__ = ["HttpStore"]
