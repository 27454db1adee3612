"""The default store: one SQLite file that any number of processes of one machine share.

What was awaited is in the file: it survives `kill -9` of every process, and loss of power too with `?sync=full`.
"""

from lightning.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
