"""The Redis store: one Redis, or a service that speaks its protocol, for the processes of many machines.

Nothing is imported here, so that a run without it does not pay for it.
"""
