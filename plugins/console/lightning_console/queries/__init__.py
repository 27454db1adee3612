"""Queries about recorded runs that several pages share, with typed, paged and bounded answers.

The invariant: a query only reads, and its cost depends on what is asked for, not on how much is stored.
"""
