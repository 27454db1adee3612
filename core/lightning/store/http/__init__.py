"""The store as a client sees it: the control API of one or several Lightning Servers."""

from lightning.store.http.store import HttpStore

__all__ = ["HttpStore"]
