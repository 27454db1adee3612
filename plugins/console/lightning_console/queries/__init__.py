"""What several pages ask of recorded runs: typed, paged and bounded answers.

The invariant: a query only reads, and what it takes follows from what is asked for, not from how much is stored.
"""
