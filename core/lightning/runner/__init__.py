"""Runs agents: in worker processes of their own, inside the trainer's process, in a Ray cluster, or in pods.

The invariant: see `lightning.runner.protocol`. Nothing is imported here, since worker processes come through this package.
"""
