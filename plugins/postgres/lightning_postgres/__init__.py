"""The store for many machines: a PostgreSQL database that any number of processes share.

What was awaited is committed with `synchronous_commit = on`: it survives the death of every process, of the database server's
too. Nothing is imported here, so that a run without it does not pay for it.
"""
