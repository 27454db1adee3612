"""The store: the one source of truth about runs, rollouts, transitions and optimizer steps.

Whatever database is behind it, a store keeps the contract of `lightning.store.protocol`; stores are made from URLs by the
plugin manager, so nothing here imports a database.
"""

from lightning.store.protocol import PRUNED, MetricPoint, Page, Store
from lightning.store.url import StoreURL, parse, sqlite_url

__all__ = [
    "PRUNED",
    "MetricPoint",
    "Page",
    "Store",
    "StoreURL",
    "parse",
    "sqlite_url",
]
