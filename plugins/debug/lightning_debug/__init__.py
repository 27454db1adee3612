"""Inspect recorded runs and measure policies: regrade rewards, advise, profile, evaluate, compare, and audit credit.

The invariant: nothing here trains, and nothing here changes recorded data.
"""
