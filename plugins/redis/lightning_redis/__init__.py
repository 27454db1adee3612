"""The Redis store: one Redis, or a service with its protocol, for the processes of many machines.

This package imports nothing here, so that a run without Redis does not pay for it.
"""
