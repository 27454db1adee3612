"""Looking into recorded runs, and measuring policies: rewards graded again, advice, profiles, evaluations, comparisons.

The invariant: nothing here trains, and nothing here changes what is recorded.
"""
