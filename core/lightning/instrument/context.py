"""The rollout that the current code runs for: its model, its token, its trace, and its reports so far.

The invariant: a report reaches the rollout in whose context it was made, or none, and never another rollout; a rollout that has
ended takes no more reports. Context variables follow tasks, `asyncio.to_thread` and forks, and `threads` carries ours into
threads and pools. A thread that starts without this (by C code, or before anything is installed) has no context: its reports
belong to the only active rollout of the process, and to none if several are active. To never mix rollouts, a thread without
context that was already busy when the rollout began (left by an earlier rollout, or a consumer of a queue that the agent's
module keeps) reports to none; give it a copied context, or a task of its own. An idle thread of a pool counts as new, since its
next work is yet to be submitted.

A model call of a thread without context is assigned by its key. But in a process that runs one rollout at a time, and ends with
a rollout that hangs, the call belongs to the active rollout whatever its key, since a client kept between rollouts has an old
key.

The ids of an attempt's trace are computed from its token. A trace id allows its holder to report about the attempt and nothing
else; the token cannot be computed from it, so the `traceparent` header may carry it to services that must not call the model.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import FrameType

from lightning.bounded import Once
from lightning.errors import DataError
from lightning.instrument.last_call import Trail, known_as, renew_lock_in_forks, starter_here
from lightning.instrument.providers import Address, Url, place_of
from lightning.instrument.texts import arguments_of, caller_of, number, size_of, state_of, text_of
from lightning.types import LLM, REJECTED, Caller, StepReward, StepState, ToolEvent, read_reason


def trace_id_of(token: str) -> str:
    """Return the trace id (32 hexadecimal digits) of the attempt with this token: the first half of the token's SHA-256."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def root_span_id(trace_id: str) -> str:
    """Return the id (16 hexadecimal digits) of an attempt's root span, the parent of all spans in the attempt."""
    return hashlib.sha256(bytes.fromhex(trace_id)).hexdigest()[:16]


def traceparent_of(token: str) -> str:
    """Return the W3C `traceparent` header (version 00, sampled) that puts the spans of other services under an attempt."""
    trace_id = trace_id_of(token)
    return f"00-{trace_id}-{root_span_id(trace_id)}-01"


logger = logging.getLogger(__name__)

MAX_REPORTS = 10_000
"""The largest number of tool events, and of step rewards, states, labels and rejections, of a rollout: an agent in an endless
loop must not fill the memory."""
MAX_REPORTED_TEXT = 8 * 1024 * 1024
"""The largest number of characters of each of these in a rollout: they are sent in one message, together with the reward."""
LONGEST_LABEL = 8192
"""The largest number of characters of a label with its response id: the gateway has the same limit for a caller."""

_current: ContextVar[ActiveAttempt | None] = ContextVar("lightning_session", default=None)
_active: list[ActiveAttempt] = []
_lock = threading.RLock()
_said = Once()
_said_in_fork = mmap.mmap(-1, 1)  # shared by all processes that are forked from this one


renew_lock_in_forks(globals())


class ActiveAttempt:
    """One attempt of a rollout inside the agent's process: it collects the reports. `activate` makes it and explains `alone`.
    Safe to use from any thread."""

    def __init__(self, llm: LLM, *, alone: bool = False) -> None:
        self.llm, self.alone = llm, alone
        self.gateway = Address(llm.base_url)
        self.calls = Trail()
        """The model calls of which the tap has seen the reply."""
        self.traceparent = traceparent_of(llm.api_key) if llm.api_key else ""
        """The W3C header that lets another service's spans join this attempt; empty without a key."""
        self._tool_events: dict[tuple[str, ...], ToolEvent] = {}
        self._step_rewards: list[StepReward] = []
        self._step_states: list[StepState] = []
        self._labels: dict[str, Caller] = {}
        self._untrained: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._unasked = set(llm.prompts)
        self.strangers: dict[int, threading.Thread] = {}
        """The threads whose reports are refused (`disown`), by ident."""
        self._process = os.getpid()
        self.open = True
        """Whether the attempt still takes reports."""

    @property
    def tool_events(self) -> tuple[ToolEvent, ...]:
        """The tool runs, in the order in which they ended. Several reports of one run are merged into one event."""
        return tuple(self._tool_events.values())

    @property
    def step_rewards(self) -> tuple[StepReward, ...]:
        """The step rewards given so far, in order."""
        return tuple(self._step_rewards)

    @property
    def step_states(self) -> tuple[StepState, ...]:
        """The states reported so far, in order."""
        return tuple(self._step_states)

    @property
    def labels(self) -> Mapping[str, Caller]:
        """The callers that the agent gave to calls by `lightning.label`, by response id."""
        return dict(self._labels)

    @property
    def untrained(self) -> Mapping[str, str]:
        """Why the calls that the agent rejected by `lightning.reject` are not trained, by response id."""
        return dict(self._untrained)

    def serves(self, url: Url) -> bool:
        """Whether a URL is one of this rollout's gateway."""
        return self.gateway.covers(type(url), place_of(url))

    def add_tool_event(self, event: ToolEvent) -> None:
        """Add a tool event, its texts and arguments shortened. An event without a response id or time gets its agent's last
        call and the current time."""
        agent = event.caller.name if event.caller else ""
        kept = ToolEvent(
            name=text_of(event.name),
            status=text_of(event.status),
            call_id=text_of(event.call_id),
            arguments=arguments_of(event.arguments),
            output=text_of(event.output),
            error=text_of(event.error),
            caller=None if event.caller is None else caller_of(event.caller),
            at=event.at or time.time(),
            response_id=text_of(event.response_id or self.calls.last(agent)),
            result=event.result,
            incomplete=event.incomplete,
            kind=text_of(event.kind),
        )
        with _lock:
            key = (kept.name, kept.call_id, kept.response_id) if kept.call_id else (str(len(self._tool_events)),)
            before = self._tool_events.get(key)
            if before is not None and not _may_be_one(before, kept):
                key, before = (*key, str(len(self._tool_events))), None
            known = 0 if before is None else 1
            if before is not None:
                kept = _merged(before, kept)
                self._sizes["tool events"] -= size_of(before)
            if kept.result and self._sizes.get("tool events", 0) + size_of(kept) > MAX_REPORTED_TEXT:
                kept = replace(kept, result="", incomplete=True)
            if self._takes("tool events", len(self._tool_events) - known, size_of(kept)):
                self._tool_events.pop(key, None)
                self._tool_events[key] = kept
            elif before is not None:
                self._sizes["tool events"] += size_of(before)

    def add_step_reward(self, reward: StepReward) -> None:
        """Add a step reward. A reward without a response id or time gets the last call and the current time. Raises `DataError`
        if its value is no number."""
        kept = StepReward(
            value=number(reward.value, "a step reward"),
            name=text_of(reward.name),
            response_id=text_of(reward.response_id or self.calls.last()),
            at=reward.at or time.time(),
        )
        with _lock:
            if self._takes("step rewards", len(self._step_rewards), size_of(kept)):
                self._step_rewards.append(kept)

    def add_state(self, state: StepState) -> None:
        """Add a state. A state without a response id gets that of the next call by this thread or task, or what it starts."""
        kept = replace(
            state,
            values=state_of(state.values),
            name=text_of(state.name),
            response_id=text_of(state.response_id),
            at=state.at or time.time(),
        )
        with _lock:
            place = len(self._step_states)
            if not self._takes("states", place, size_of(kept)):
                return
            self._step_states.append(kept)

        def before(response_id: str) -> None:
            self._step_states[place] = replace(self._step_states[place], response_id=response_id)

        if not kept.response_id:
            self.calls.await_next(before)

    def add_label(self, response_id: str, caller: Caller) -> None:
        """Add a name for the caller of one model call; a later name for the same call replaces it."""
        with _lock:
            count = 0 if response_id in self._labels else len(self._labels)
            if self._takes("labels", count, len(response_id) + size_of(caller)):
                self._labels[response_id] = caller

    def add_untrained(self, response_id: str, reason: str) -> None:
        """Add the reason why one model call is not trained; a later reason for the same call replaces it."""
        with _lock:
            count = 0 if response_id in self._untrained else len(self._untrained)
            if self._takes("rejections", count, len(response_id) + len(reason)):
                self._untrained[response_id] = reason

    def prompt(self, name: str, default: str) -> str:
        """Return the prompt template of a component in this rollout: `default` unless the rollout replaces it."""
        self._unasked.discard(name)
        return self.llm.prompts.get(name, default)

    def close(self) -> None:
        """Refuse reports from now on, and log the rollout's prompts that no component asked for."""
        self.open = False
        for name in sorted(self._unasked):
            log_once(
                f"prompt {name}",
                "no component asked for the prompt %r in a rollout: is there a component(%r, prompt=...), and is its "
                ".prompt what the agent sends?",
                name,
                name,
            )

    def knows(self, thread: int) -> bool:
        """Whether a thread without a context, given by its ident, may belong to the rollout: it was not disowned."""
        stranger = self.strangers.get(thread)
        return stranger is None or not stranger.is_alive()  # a new thread may get the ident of one that has ended

    def disown(self, threads: Mapping[int, threading.Thread]) -> None:
        """Refuse reports from these threads, by ident, from now on."""
        self.strangers.update(threads)

    def _takes(self, what: str, count: int, size: int) -> bool:
        """Whether a report of the kind `what`, of `size` characters, is taken beside the `count` that are kept; then its size
        is counted. A refusal is logged once."""
        total = self._sizes.get(what, 0) + size
        if self._process != os.getpid():
            _say_in_fork(what)
        elif not self.open:
            log_once(f"late {what}", "%s reported after their rollout had ended were dropped", what)
        elif count >= MAX_REPORTS:
            log_once(f"many {what}", "a rollout reported more than %d %s; the rest were dropped", MAX_REPORTS, what)
        elif total > MAX_REPORTED_TEXT:
            message = "a rollout reported more than %d characters of %s; what was too much was dropped"
            log_once(f"long {what}", message, MAX_REPORTED_TEXT, what)
        else:
            self._sizes[what] = total
            return True
        return False


def _say_in_fork(what: str) -> None:
    """Warn, once in all forked processes together, that reports made in a forked process are lost."""
    if not _said_in_fork[0]:
        _said_in_fork[0] = 1
        logger.warning(
            "%s reported in a process that the agent forked (multiprocessing, os.fork) were dropped, since they cannot reach "
            "the rollout: return them from the forked process, and report them in the agent's own process",
            what,
        )


def _may_be_one(one: ToolEvent, other: ToolEvent) -> bool:
    """Whether two reports with one call id may be of the same run; some policy servers use an id for several calls.
    They are not if both have a final status and the statuses differ or one framework reported both, or if arguments differ."""
    if "unknown" not in (one.status, other.status):
        tellers = {event.caller.framework if event.caller else "" for event in (one, other)}
        if one.status != other.status or (len(tellers) == 1 and "" not in tellers):
            return False
    return one.arguments == other.arguments or one.arguments is None or other.arguments is None


def _merged(before: ToolEvent, after: ToolEvent) -> ToolEvent:
    """Merge two reports of one tool run: the later report counts, unless its status is unknown, and missing fields come from
    the other."""
    known, other = (before, after) if after.status == "unknown" else (after, before)
    return replace(
        known,
        arguments=other.arguments if known.arguments is None else known.arguments,
        output=known.output or (other.output if other.status == known.status else ""),
        error=known.error or (other.error if other.status == known.status else ""),
        caller=known.caller or other.caller,
        result=known.result or other.result,
        incomplete=known.incomplete or other.incomplete,
    )


@contextmanager
def activate(llm: LLM, *, alone: bool = False) -> Iterator[ActiveAttempt]:
    """Make an attempt the current one for the code inside the block, and yield the attempt, which collects the reports.

    `alone` says that no other attempt runs in this process at the same time, and that no ended attempt still runs code in it.
    """
    attempt = ActiveAttempt(llm, alone=alone)
    attempt.disown(_busy_threads())
    with _lock:
        _active.append(attempt)
    try:
        with known_as(_current, attempt), attempt.calls.given():
            yield attempt
    finally:
        attempt.close()
        with _lock:
            _active.remove(attempt)
            _leave_behind(attempt)


def _leave_behind(ended: ActiveAttempt) -> None:
    """Make all active attempts disown the busy threads without context that an ended attempt may have left: such a thread may
    belong to any attempt that ran at the same time."""
    if _active:
        before = ended.strangers
        left = {ident: thread for ident, thread in _busy_threads().items() if before.get(ident) is not thread}
        for attempt in _active:
            attempt.disown(left)


def _busy_threads() -> dict[int, threading.Thread]:
    """Return the other threads of the process, by ident, but threads of a pool that wait for work."""
    waiting = getattr(getattr(sys.modules.get("concurrent.futures.thread"), "_worker", None), "__code__", None)
    frames = _frames()
    here = threading.get_ident()
    return {
        thread.ident: thread
        for thread in threading.enumerate()
        if thread.ident is not None
        and thread.ident != here
        and (waiting is None or (frame := frames.get(thread.ident)) is None or frame.f_code is not waiting)
    }


def _frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by ident.

    Garbage collection is off during the call: in early releases of Python 3.11 it can cause a deadlock there (CPython's
    gh-106883), since the call holds a lock that starting and ending threads need, and a finaliser may let such a thread run.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()  # noqa: SLF001 — there is no other way
    finally:
        if collecting:
            gc.enable()


def current_attempt() -> ActiveAttempt | None:
    """Return the rollout that this code runs for; in a thread without context, the only active rollout of the process.

    None if there is none. Also None, with a log line, in a thread without context that was busy before the rollout began, since
    its reports may belong to an earlier rollout.
    """
    attempt, stranger = _find()
    if stranger:
        log_once(
            "stranger",
            "reports of a thread that was busy before this rollout began are dropped, since they may belong to an earlier "
            "rollout: start the thread in the rollout, or run its work in contextvars.copy_context()",
        )
    return attempt


def calling_attempt() -> ActiveAttempt | None:
    """Return the rollout of a model call: as `current_attempt`, but without a log line if there is none, because nothing is
    lost then."""
    return _find()[0]


def attempt_in_context() -> ActiveAttempt | None:
    """Return the rollout of the current context, else the rollout in which this thread was started, if that still runs."""
    attempt = _current.get()
    if attempt is None and (starter := starter_here()) is not None:
        attempt = starter.attempt
    return attempt


def _find() -> tuple[ActiveAttempt | None, bool]:
    """Return the rollout that this code runs for, and whether it is None because this thread may belong to an earlier
    rollout."""
    attempt = attempt_in_context()
    if attempt is not None:
        return attempt, False
    with _lock:
        only = _active[0] if len(_active) == 1 else None
        if only is None or only.knows(threading.get_ident()):
            return only, False
    return None, True


def attempt_of(key: str) -> ActiveAttempt | None:
    """Return the active rollout with this key; None if there is none or more than one, or the key is empty."""
    with _lock:
        found = [attempt for attempt in _active if attempt.llm.api_key == key] if key else []
    return found[0] if len(found) == 1 else None


def certain_attempt() -> ActiveAttempt | None:
    """Return the rollout of the current context; in a thread without context, the rollout that runs alone in the process. Else
    None."""
    attempt = calling_attempt()
    return attempt if attempt is None or attempt.alone else attempt_in_context()


def active() -> bool:
    """Whether any rollout is active in this process."""
    return bool(_active)


def is_gateway(url: Url) -> bool:
    """Whether a URL is one of the gateway of a rollout that is active in this process."""
    attempts = tuple(_active)
    if not attempts:
        return False
    kind, place = type(url), place_of(url)
    return any(attempt.gateway.covers(kind, place) for attempt in attempts)


def emit(event: ToolEvent | StepState) -> None:
    """Add a tool event or a state to the current rollout. Adapters get this function. Outside a rollout it does nothing."""
    attempt = current_attempt()
    if attempt is None:
        return
    if isinstance(event, StepState):
        attempt.add_state(event)
    else:
        attempt.add_tool_event(event)


def _attempt_for(function: str) -> ActiveAttempt | None:
    """Return the rollout that this code runs for; None outside of one, with a log line that this function did nothing."""
    attempt = current_attempt()
    if attempt is None:
        log_once(f"{function} outside", f"lightning.{function}() was called outside a rollout and did nothing")
    return attempt


def state(**variables: object) -> None:
    """Record the agent's state before its next model call, as named values: `lightning.state(board=board, turn=3)`.

    The state belongs to the next call that this thread or asyncio task makes, or that is made by a thread or task it starts. It
    is kept as a `StepState` of at most 4 KB of JSON; values that JSON cannot hold are kept as text. Training does not use it.

    Outside a rollout this does nothing, so code that is also used without training may keep it.
    """
    if (attempt := _attempt_for("state")) is not None:
        attempt.add_state(StepState(state_of(variables)))


def reward(value: float, name: str = "reward", response_id: str = "") -> None:
    """Give a reward in the middle of a rollout, for the call `response_id` or, if that is empty, for the last model call.

    The reward goes to the last call of this thread or asyncio task and of those that it started; if these made no call, to the
    last call of the thread or task that started this one. A thread without a context (one that C code starts) counts as started
    by the agent itself; if it made the last call, rewards of other tasks and threads go to a call by their time. Calls of
    clients that the tap does not know are not seen: in an agent with both kinds, give the id of the reply.

    Outside a rollout this does nothing, so code that is also used without training may keep it. Raises `DataError` if `value`
    is not a finite number between -1e12 and 1e12.
    """
    what = f"the reward of lightning.reward(name={text_of(name)!r})"
    checked = number(value, what, "give a finite number")
    if (attempt := _attempt_for("reward")) is not None:
        attempt.add_step_reward(StepReward(checked, name, response_id))


def label(response_id: str, *, agent: str, path: Sequence[str] = ()) -> None:
    """Name the agent that made a model call, after the call: for clients that neither an adapter nor the tap sees.

    `response_id` is the `id` of the model's reply (also its header `x-request-id`); all choices of the reply get the name.
    `path` are the names from the outermost to the innermost, as `train_agents` matches them. A label replaces the name that the
    call had, and a later label replaces an earlier one. An id that no call of this rollout has is ignored, with a line in the
    log.

    Outside a rollout this does nothing, so code that is also used without training may keep it. Raises `DataError` unless all
    are non-empty strings of at most 8192 characters together, and no name has a slash, which separates the names of a path in
    `train_agents`.
    """
    listed = isinstance(path, Sequence) and not isinstance(path, str)
    names = tuple(path) if listed else ()
    texts = (response_id, agent, *names)
    if (
        not listed
        or not all(isinstance(text, str) and text for text in texts)
        or any("/" in text for text in texts[1:])
    ):
        raise DataError(
            f"lightning.label({response_id!r}, agent={agent!r}, path={path!r}): give the id of the model's reply, the name "
            "of the agent and, if you like, a list of names from the outermost to the innermost; none empty, no name with '/'"
        )
    if sum(map(len, texts)) > LONGEST_LABEL:
        raise DataError(f"lightning.label(): a label of {sum(map(len, texts))} characters; {LONGEST_LABEL} are allowed")
    if (attempt := _attempt_for("label")) is not None:
        attempt.add_label(response_id, Caller(agent, names))


def reject(reason: str = REJECTED, response_id: str = "") -> None:
    """Leave the model call `response_id`, or, if that is empty, the last one, out of training, because the agent does not go on
    with its answer: `lightning.reject("compaction, rejected")`.

    The call stays in the record with the reason, and belongs to the environment like a call of another agent. The last call is
    that of `lightning.reward`. A later rejection of the same call replaces the reason.

    Outside a rollout this does nothing, so code that is also used without training may keep it. Raises `DataError` for a reason
    that is not 1 to 80 printable ASCII characters, and for an id that is none.
    """
    checked = read_reason(reason, "the reason of lightning.reject()")
    if not isinstance(response_id, str) or len(response_id) > LONGEST_LABEL:
        raise DataError(f"lightning.reject(response_id={response_id!r:.200}): give the `id` of the model's reply")
    if (attempt := _attempt_for("reject")) is None:
        return
    if rejected := response_id or attempt.calls.last():
        attempt.add_untrained(rejected, checked)
    else:
        log_once(
            "reject",
            "lightning.reject() rejected nothing: which call was the last one is not known here. Give the id of the reply, "
            "reject(reason, response_id=reply.id)",
        )


def log_once(key: str, message: str, *arguments: object) -> None:
    """Log a warning, but only the first time for a `key`: code that runs for every model call must not flood the log."""
    with _lock:
        first = _said.first(key)
    if first:
        logger.warning(message, *arguments)
