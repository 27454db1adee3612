"""The Redis store: one Redis, or a service that speaks its protocol, for the processes of many machines.

Its client is imported when a store is made, so that nothing here costs who does not use it.
"""

from lightning.store.redis.store import RedisStore

__all__ = ["RedisStore"]
