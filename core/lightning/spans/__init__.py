"""OpenTelemetry GenAI spans of a rollout: the ids of its trace, and what its spans say about its tools and agents.

The invariant: a span is evidence beside the gateway's record, never instead of it. What spans add to a rollout is settled when
its attempt ends and is stored with the outcome, so nothing that arrives later changes what was trained.
"""
