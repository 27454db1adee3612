"""The Redis store: one Redis, or a service that speaks its protocol, for the processes of many machines.

Nothing is imported here, so that it costs nothing who does not use it.
"""
