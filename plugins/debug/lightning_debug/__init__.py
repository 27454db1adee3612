"""Inspect recorded runs and measure policies: regrade rewards, advise, profile, evaluate and compare.

The invariant: nothing here trains, and nothing here changes recorded data.
"""
