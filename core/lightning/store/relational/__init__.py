"""The operations of a store, written once for every database that speaks their SQL.

An operation is a coroutine over a `Transaction`. Asyncpg suspends it, the thread that writes to SQLite drives it to its end at
once; neither the rules nor the SQL know which.
"""
