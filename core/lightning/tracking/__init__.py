"""Trackers: where metrics and finished rollouts go besides the store.

The invariant: training neither waits for a tracker nor fails with one. This module imports nothing, so that plugins stay light.
"""
