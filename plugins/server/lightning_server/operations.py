"""The store's operations over HTTP: the table from which client, server, description and project check are made.

The invariant: an operation is added by a method of `Store` and a line here, or by a plugin's table (`register_operations`).
Everything that client, server and project check must know of it is derived from its signature and its one line. Only such
operations travel, except `watch`, which answers more than once, and what servers say of themselves.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from typing import Any, Final, get_args, get_origin, get_type_hints

from lightning.store.operation import ANY, LOOK, RUN, TRAIN, HttpLine, Operation, Operations, operations_of
from lightning.store.protocol import Page
from lightning.types import Rollout

from lightning_server import json_codec, messages

REQUIRED: Final = inspect.Parameter.empty
PAGING: Final = ("after", "cursor", "limit")
"""Arguments that choose a part of a list."""
QUERY: Final[Mapping[str, str]] = {
    "project": "Runs of this project only.",
    "split": "Of this split only: `train` or the name of an evaluation.",
    "step": "Sampled for this optimizer step only.",
    "status": "With this status only.",
    "attempt": "The attempt; by default the rollout's current one.",
    "run": "The run; empty for what belongs to the whole store, which is for admins.",
}
"""Descriptions of query parameters, for operations that give none themselves."""
ANSWER_SECONDS: Final = 90.0
"""A client takes a server for gone after this many seconds without a byte from it."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of an operation. `default` is `REQUIRED` where the argument must be given."""

    name: str
    hint: Any
    default: Any = REQUIRED


class HttpOperation:
    """An operation, described from its `HttpLine`. `path` names arguments in braces. `query` and `body` have the other
    arguments, except `once` and those of `PAGING`.

    `told` describes each query parameter. `sent` and `answered` are the types of the request's body and of the answer; `item`
    is the type of a list's items, None where the answer is no list. `empty` says how a caller is answered who asks for
    something outside its project: with `nothing()` if true, with a refusal otherwise.
    """

    def __init__(self, operation: Operation, line: HttpLine) -> None:
        self.operation, self.name = operation, operation.name
        self.scopes, self.cursor, self.empty, self.missing = line.scopes, tuple(line.cursor), line.empty, line.missing
        self.answer_seconds = ANSWER_SECONDS if line.answer_seconds is None else line.answer_seconds
        self.doc = line.doc or " ".join((inspect.getdoc(operation.function) or "").partition("\n\n")[0].split())
        self.method, _, path = line.route.partition(" ")
        self.path, _, listed = path.partition("?")
        hints = get_type_hints(operation.function, localns=json_codec.LOCAL)
        self.result = hints["return"]
        found = {
            name: Argument(name, hints[name], part.default) for name, part in operation.signature.parameters.items()
        }
        self.once = found.get("once")
        lists = get_origin(self.result) is list and not line.answer and self.method == "GET"
        self.is_page = get_origin(self.result) is Page
        self.item = get_args(self.result)[0] if lists or self.is_page else None
        self.pages_itself = self.item is not None and not found.keys().isdisjoint(PAGING)
        left_out = {"once", *line.unsent, *(PAGING if self.item is not None else ())}
        in_path = re.findall(r"{(\w+)}", self.path)
        rest = [part for name, part in found.items() if name not in left_out and name not in in_path]
        self.in_path = tuple(found[name] for name in in_path if name in found)
        self.query = tuple(part for part in rest if self.method in ("GET", "DELETE") or part.name in listed.split("&"))
        self.body = tuple(part for part in rest if part not in self.query)
        self.whole_body = line.body if isinstance(line.body, str) else ""
        self.field = line.answer if isinstance(line.answer, str) else ""
        self.is_optional = type(None) in get_args(self.result)
        self.told = {part.name: line.query.get(part.name) or QUERY.get(part.name, "") for part in self.query}
        self.sent = line.body if isinstance(line.body, type) else self._sent()
        self.answered = line.answer if isinstance(line.answer, type) else self._answered()
        if not all(self.told.values()):
            raise TypeError(
                f"the operation {self.name} does not say what its parameters mean: give it query={self.told}"
            )

    def __repr__(self) -> str:
        return f"HttpOperation({self.name}: {self.method} {self.path})"

    @property
    def is_in_parts(self) -> bool:
        """Whether a client may split a long request into several: its body is a list of items to store, its answer how many
        were stored."""
        return self.result is int and len(self.body) == 1 and _is_sequence(self.body[0].hint)

    @property
    def is_read_in_parts(self) -> bool:
        """Whether a server may answer a list request for its first items only; the client then asks for the rest."""
        return get_origin(self.result) is list and len(self.body) == 1 and _is_sequence(self.body[0].hint)

    def nothing(self) -> Any:
        """Return the answer about something that does not exist: an empty page or list, 0, or None."""
        if self.is_page:
            return Page(())
        return [] if get_origin(self.result) is list else 0 if self.result is int else None

    def _sent(self) -> Any:
        if not self.body:
            return None
        if self.whole_body:
            return next(part.hint for part in self.body if part.name == self.whole_body)
        return _record(f"{_camel(self.name)}Request", f"What `{self.name}` is asked.", self.body)

    def _answered(self) -> Any:
        if self.field:
            told = [Argument(self.field, self.result)]
            return _record(f"{_camel(self.name)}Answer", f"What `{self.name}` answers.", told)
        if self.item is not None:
            item: Any = self.item
            return Page[item]
        if self.is_optional:
            return next(part for part in get_args(self.result) if part is not type(None))
        return self.sent if self.result is type(None) else self.result


def _is_sequence(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def _record(name: str, doc: str, parts: Sequence[Argument]) -> type:
    """Make a dataclass with these fields. A field of any JSON or of a mapping may be left out."""
    fields = []
    for part in parts:
        options: dict[str, Any] = {} if part.default is REQUIRED else {"default": part.default}
        if part.hint is json_codec.AnyJson:
            options = {"default": None}
        elif get_origin(part.hint) is Mapping:
            options = {"default_factory": dict}
        fields.append((part.name, part.hint, field(**options)))
    made = make_dataclass(name, fields, frozen=True, kw_only=True)
    made.__doc__ = doc
    return made


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


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
