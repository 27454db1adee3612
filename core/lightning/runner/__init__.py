"""Runs agents: in worker processes of their own, or inside the trainer's process.

The invariant: see `lightning.runner.protocol`. Nothing is imported here, since worker processes come through this package.
"""
