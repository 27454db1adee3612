"""Runs agents, in worker processes of their own or inside the trainer's process, and judges how each attempt ended.

The invariant: whatever an agent does becomes an outcome (`lightning.runner.protocol`). This module imports nothing, because
every worker process imports it first.
"""
