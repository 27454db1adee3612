"""Looking after a database: what is in it, copies of it, taking away what nothing needs any more, and its content as files.

The invariant: whatever is taken away was asked for by name, and nothing that a run needs to go on is, unless that was asked for
too.
"""

from lightning_db.keeper import DatabaseStatus, Keeper, Weight, count_tokens, keeper_of, look

__all__ = ["DatabaseStatus", "Keeper", "Weight", "count_tokens", "keeper_of", "look"]
