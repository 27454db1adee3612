"""The plugin `proof`: `lightning audit`, forks of runs, and recorded steps that are taken again.

The invariant: an audit uses the store alone, and only reads it.
"""
