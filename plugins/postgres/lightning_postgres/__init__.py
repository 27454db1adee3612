"""The store for many machines: a PostgreSQL database that any number of processes share.

Awaited writes are committed with `synchronous_commit = on`: they survive the death of every process, including the database
server. Nothing is imported here, so that a run with another store does not load the driver.
"""
