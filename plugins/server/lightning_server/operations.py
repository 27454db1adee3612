"""The store's operations over HTTP: the table from which client, server, description and project check are made.

The invariant: an operation is added by a method of `Store` and a line here, or by a plugin's table (`register_operations`).
Only such operations travel, except `watch`, which answers more than once, and what servers say of themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

from lightning.store.operation import ANY, LOOK, RUN, TRAIN, HttpLine, Operation, Operations, operations_of
from lightning.types import Rollout

from lightning_server import messages
from lightning_server.http_operation import HttpOperation

LEASE_ANSWER: Final = 10.0
"""A client takes a server for gone after this many seconds without a byte, at requests during which a lease may expire: it then
has time to renew the lease at another server."""
OUTCOME_ANSWER: Final = 20.0
"""The same for sending an outcome, which may be long."""

RUNS: Final = "GET /runs lists those there are"
ATTEMPT: Final = "/rollouts/{rollout}/attempts/{attempt}"


LINES: Final[Mapping[str, HttpLine]] = {
    # runs -------------------------------------------------------------------------------------------------------
    "list_runs": HttpLine(
        "GET /runs",
        ANY,
        cursor=("id",),
        doc="Runs, newest first.",
        query={"brief": "`true` leaves their configurations out, which may be long: `config` is empty."},
    ),
    "put_run": HttpLine(
        "POST /runs",
        TRAIN,
        body="run",
        doc="Create a run, or get the one that has the id already, unchanged. Without `created_at` it is created now.",
    ),
    "get_run": HttpLine("GET /runs/{run}", ANY, empty=True, missing=RUNS, doc="One run, by its id."),
    # rollouts ---------------------------------------------------------------------------------------------------
    "list_rollouts": HttpLine(
        "GET /runs/{run}/rollouts",
        ANY,
        empty=True,
        doc="Rollouts of a run in the order in which they were created.",
    ),
    "count_rollouts": HttpLine("GET /runs/{run}/rollout_counts", ANY, answer="counts", empty=True),
    "create_rollouts": HttpLine(
        "POST /rollouts",
        TRAIN,
        answer="created",
        doc="Create rollouts with ids of the caller's choice; repeating it changes nothing. All or none are created.",
    ),
    "get_rollout": HttpLine(
        "GET /rollouts/{rollout}",
        ANY,
        empty=True,
        missing="POST /rollouts creates one",
        doc="One rollout as it stands.",
    ),
    "lease": HttpLine(
        "POST /leases",
        RUN,
        body=messages.LeaseRequest,
        answer=messages.Leases,
        empty=True,
        doc="Take pending rollouts of a run, or running ones whose lease has expired, each as a new attempt, with what its "
        "agent needs to call the model. No new ones while no policy server of the run answers: ask again. 404 for a run that "
        "nobody has created; `over` says that there will be no more.",
    ),
    "release": HttpLine(
        "POST /leases/release",
        RUN,
        answer="released",
        answer_seconds=LEASE_ANSWER,
        doc="Give back everything that a worker holds, without spending a retry. For a worker that starts again, or drains.",
    ),
    "renew": HttpLine(
        f"POST {ATTEMPT}/renew",
        RUN,
        body=messages.Renewal,
        answer=messages.Expiry,
        doc="Prolong the lease of the running attempt. 409 when it was superseded or has ended: stop its agent.",
    ),
    "complete": HttpLine(
        f"POST {ATTEMPT}/complete",
        RUN,
        unsent=("spend",),
        answer=Rollout,
        answer_seconds=OUTCOME_ANSWER,
        doc="End an attempt with a reward or a fault, judged by the calls that were recorded. Repeating it changes nothing; "
        "409 when the attempt was superseded or has ended otherwise: drop the work.",
    ),
    # what attempts leave ----------------------------------------------------------------------------------------
    "next_seq": HttpLine(f"GET {ATTEMPT}/next_seq", TRAIN, answer="seq", empty=True),
    "transitions": HttpLine(
        "GET /rollouts/{rollout}/transitions",
        LOOK,
        cursor=("seq",),
        doc="The model calls of an attempt in `seq` order.",
    ),
    "append": HttpLine(
        "POST /transitions",
        TRAIN,
        answer="appended",
        doc="Store calls durably. A repeated one changes nothing; 409 for another content under the same key.",
    ),
    "transitions_of": HttpLine(
        "POST /transitions/read",
        LOOK,
        answer="transitions",
        doc="The model calls of several attempts, of as many of the first ones as fit into one answer; ask again for the rest.",
    ),
    "attempts_of": HttpLine(
        "POST /attempts/read",
        LOOK,
        answer="attempts",
        doc="What several attempts were completed with, of as many of the first ones as fit into one answer; ask again for the "
        "rest. An attempt that is null is the rollout's current one.",
    ),
    # steps, metrics, small state --------------------------------------------------------------------------------
    "steps": HttpLine(
        "GET /runs/{run}/steps",
        LOOK,
        cursor=("step",),
        empty=True,
        doc="Committed optimizer steps in order.",
        query={"brief": "`true` leaves out what was trained: `rollouts`, `digests` and `groups` are empty."},
    ),
    "last_step": HttpLine(
        "GET /runs/{run}/last_step",
        LOOK,
        empty=True,
        missing="the run has committed none",
        doc="The committed step with the largest number.",
    ),
    "commit_step": HttpLine(
        "POST /steps",
        TRAIN,
        body="record",
        doc="Record an optimizer step and mark its rollouts trained, all or nothing; repeating it changes nothing. 409 when "
        "the step exists with another batch, when one of the rollouts was trained already (and `context.reuse` does not "
        "declare it, or it was in more steps than that allows), or when its attempt is another.",
    ),
    "metrics": HttpLine("GET /runs/{run}/metrics", LOOK, cursor=("step",), empty=True),
    "log_metrics": HttpLine("POST /runs/{run}/metrics", TRAIN),
    "get_state": HttpLine(
        "GET /state/{key}?run",
        LOOK,
        answer="value",
        empty=True,
        doc="The value kept under a key, null when there is none.",
    ),
    "put_state": HttpLine(
        "PUT /state/{key}?run", TRAIN, doc="Keep a small value under a key, in place of an older one."
    ),
    "keep_state": HttpLine(
        "POST /state/{key}/keep?run",
        TRAIN,
        answer="value",
        doc="Keep a small value unless the key has one; the answer has the one that is kept.",
    ),
}
"""The route of each method of `lightning.store.operation.Operations`."""


@cache
def over_http(operation: Operation) -> HttpOperation:
    """Return how an operation of the store or of a plugin travels over HTTP."""
    return HttpOperation(operation, operation.line or LINES[operation.name])


OPERATIONS: Final = tuple(map(over_http, operations_of(Operations)))
