"""Runs agents: in worker processes of their own, inside the trainer's process, in a Ray cluster, or in pods.

The invariant: whatever an agent does becomes an outcome (`lightning.runner.protocol`). This module imports nothing, because
every worker process imports it first.
"""
