"""Looking into recorded runs: a rollout is run again with its model calls answered from the record.

The invariant: nothing here trains, and nothing here changes what is recorded.
"""
