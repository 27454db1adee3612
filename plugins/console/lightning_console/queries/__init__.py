"""What can be asked of recorded runs: typed, paged and bounded answers, which any front end, a program or an agent can use.

The invariant: a query only reads, and what it takes follows from what is asked for, not from how much is stored.
"""
