"""Answers from the record: a recorded rollout, its answers as streams, and the branches that begin as it did."""
