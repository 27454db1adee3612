"""The trace of an attempt: ids that everybody who holds the attempt's token computes alike.

The invariant: whoever knows a trace id can say something about that attempt and can do nothing else; it does not lead back to
the token, so it may travel in the `traceparent` header to services that must not call the model.
"""

from __future__ import annotations

import hashlib


def trace_id_of(token: str) -> str:
    """The trace id (32 hexadecimal digits) of the attempt with this token: the first half of its SHA-256."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def root_span_id(trace_id: str) -> str:
    """The span id (16 hexadecimal digits) of the attempt itself, the parent of whatever happens in it."""
    return hashlib.sha256(bytes.fromhex(trace_id)).hexdigest()[:16]


def traceparent_of(token: str) -> str:
    """The W3C `traceparent` header under which the services of an attempt work: version 00, sampled."""
    trace_id = trace_id_of(token)
    return f"00-{trace_id}-{root_span_id(trace_id)}-01"
