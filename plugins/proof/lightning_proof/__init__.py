"""Proves what a run learned: `lightning audit`, forks of runs, and the repetition of recorded steps.

The invariant: an audit uses the store alone, and only reads it.
"""
