"""The rollout that this code runs for: its model, its token, its trace, and what it has reported so far.

The invariant: a report reaches exactly the rollout whose context it was made in, or none; a rollout that has ended takes
no more reports. Context variables follow tasks, `asyncio.to_thread` and forks, and `threads` carries ours into threads
and pools. A thread that begins behind its back (C code starts it, or nothing is installed) has no context: there a report
belongs to the process's only active rollout, and to none when several are active. The price of never mixing rollouts: a
bare thread that was already busy when the rollout began (left behind by an earlier one, or a consumer of its own queue that
the agent's module keeps) reports to nobody; give it a copied context, or a task of its own. An idle thread of a pool counts
as new, since what it will run has yet to be submitted.

A model call of a thread without context is told by its key. Where one rollout runs at a time in a process that ends with one
that hangs, the call belongs to the active one whatever its key: a client that is kept between rollouts has an old one.

Everybody who holds the attempt's token computes the ids of its trace alike. Whoever knows a trace id can say something about
that attempt and can do nothing else; it does not lead back to the token, so it may travel in the `traceparent` header to
services that must not call the model.
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
from lightning.instrument.last_call import Trail, starter_here
from lightning.instrument.providers import Address, Url, place_of
from lightning.instrument.texts import arguments_of, caller_of, number, size_of, state_of, text_of
from lightning.types import LLM, Caller, StepReward, StepState, ToolEvent


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


logger = logging.getLogger(__name__)

MAX_REPORTS = 10_000
"""Tool events, step rewards, states, and labels, kept per rollout; an agent in an endless loop must not fill the memory."""
MAX_REPORTED_TEXT = 8 * 1024 * 1024
"""Characters of each of these kept per rollout: they travel in one message, together with the reward."""
LONGEST_LABEL = 8192
"""Characters of a label, its response id included: the gateway reads no longer caller either."""

_current: ContextVar[ActiveAttempt | None] = ContextVar("lightning_session", default=None)
_active: list[ActiveAttempt] = []
_lock = threading.RLock()
_said = Once()
_said_in_fork = mmap.mmap(-1, 1)  # shared by all processes that are forked from this one


def _unlock() -> None:
    """In a process that was just forked: the thread that held the lock is not in it, and will never let go."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


class ActiveAttempt:
    """One attempt of a rollout as seen from inside the agent's process. Made by `activate`; safe to use from any thread."""

    def __init__(self, llm: LLM, *, alone: bool = False) -> None:
        self.llm, self.alone = llm, alone
        self.gateway = Address(llm.base_url)
        self.calls = Trail()
        """The model calls that the tap has seen answered."""
        self.traceparent = traceparent_of(llm.api_key) if llm.api_key else ""
        """The W3C header that lets another service's spans join this attempt; empty without a key."""
        self._tool_events: dict[tuple[str, ...], ToolEvent] = {}
        self._step_rewards: list[StepReward] = []
        self._step_states: list[StepState] = []
        self._labels: dict[str, Caller] = {}
        self._sizes: dict[str, int] = {}
        self._unasked = set(llm.prompts)
        self.strangers: dict[int, threading.Thread] = {}
        """The threads that have been disowned, by ident."""
        self._process = os.getpid()
        self.open = True
        """Whether it still takes reports."""

    @property
    def tool_events(self) -> tuple[ToolEvent, ...]:
        """The tools that ran, in the order in which they ended. One run is one event, whoever reported it and how often."""
        return tuple(self._tool_events.values())

    @property
    def step_rewards(self) -> tuple[StepReward, ...]:
        """The rewards given on the way, in order."""
        return tuple(self._step_rewards)

    @property
    def step_states(self) -> tuple[StepState, ...]:
        """The states told on the way, in order."""
        return tuple(self._step_states)

    @property
    def labels(self) -> Mapping[str, Caller]:
        """Who made which calls, by response id."""
        return dict(self._labels)

    def serves(self, url: Url) -> bool:
        """Whether a URL belongs to the gateway of this rollout."""
        return self.gateway.covers(type(url), place_of(url))

    def add_tool_event(self, event: ToolEvent) -> None:
        """Keep a tool event, its texts and arguments clipped, with its agent's last call and the time if it has none."""
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
        """Keep a step reward, with the last call and the time if it has none. Raises `DataError` when it is no number."""
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
        """Keep a state, for the next call of the flow that tells it."""
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
        """Keep the name of the caller of one model call; a later one for the same call replaces it."""
        with _lock:
            count = 0 if response_id in self._labels else len(self._labels)
            if self._takes("labels", count, len(response_id) + size_of(caller)):
                self._labels[response_id] = caller

    def prompt(self, name: str, default: str) -> str:
        """The prompt template of a component in this rollout."""
        self._unasked.discard(name)
        return self.llm.prompts.get(name, default)

    def close(self) -> None:
        """Take no more reports."""
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
        """Whether a thread without a context, given by its ident, may be the rollout's: it is not one of `disown`."""
        stranger = self.strangers.get(thread)
        return stranger is None or not stranger.is_alive()  # an ident is given again when its thread has ended

    def disown(self, threads: Mapping[int, threading.Thread]) -> None:
        """Take no reports from these threads."""
        self.strangers.update(threads)

    def _takes(self, what: str, count: int, size: int) -> bool:
        """Whether there is room for one more, of `size` characters, beside the `count` that are kept."""
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
    """Say once, in whichever process, that reports do not come back from a forked one."""
    if not _said_in_fork[0]:
        _said_in_fork[0] = 1
        logger.warning(
            "%s reported in a process that the agent forked (multiprocessing, os.fork) were dropped, since nothing brings them "
            "back to the rollout: report them in the agent's own process, from what the forked one returns",
            what,
        )


def _may_be_one(one: ToolEvent, other: ToolEvent) -> bool:
    """Whether two reports under one call id may be of one run: some policy servers give their ids again. A run has one status
    in the end, and no framework tells it twice."""
    if "unknown" not in (one.status, other.status):
        tellers = {event.caller.framework if event.caller else "" for event in (one, other)}
        if one.status != other.status or (len(tellers) == 1 and "" not in tellers):
            return False
    return one.arguments == other.arguments or one.arguments is None or other.arguments is None


def _merged(before: ToolEvent, after: ToolEvent) -> ToolEvent:
    """What two reports say of one tool run: the later one counts, but for what only the earlier one knows."""
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
    """Make an attempt the current one for the code inside the block, and collect what it reports.

    `alone`: no other attempt runs in this process, nor goes on in it after its end.
    """
    attempt = ActiveAttempt(llm, alone=alone)
    attempt.disown(_busy_threads())
    token = _current.set(attempt)
    with _lock:
        _active.append(attempt)
    try:
        with attempt.calls.given():
            yield attempt
    finally:
        attempt.close()
        with _lock:
            _active.remove(attempt)
            _leave_behind(attempt)
        _current.reset(token)


def _leave_behind(ended: ActiveAttempt) -> None:
    """What a rollout has left running may be anybody's that ran beside it, so it is nobody's."""
    if _active:
        before = ended.strangers
        left = {ident: thread for ident, thread in _busy_threads().items() if before.get(ident) is not thread}
        for attempt in _active:
            attempt.disown(left)


def _busy_threads() -> dict[int, threading.Thread]:
    """The other threads that are in the middle of something, by ident; a pool's thread that waits for work is not."""
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
    """The innermost frame of each thread.

    Early releases of Python 3.11 lock up for ever when garbage is collected inside the call (CPython's gh-106883): it holds a
    lock that a thread which begins or ends waits for, and a finaliser lets that thread run.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()  # noqa: SLF001 — there is no other way
    finally:
        if collecting:
            gc.enable()


def current_attempt() -> ActiveAttempt | None:
    """The rollout this code runs for; in a thread that lost its context, the process's only active one.

    None in such a thread when it was busy before that rollout began: what it reports belongs to an earlier one.
    """
    attempt, stranger = _find()
    if stranger:
        log_once(
            "stranger",
            "a thread that was busy before this rollout began reports to nobody, since it may belong to an earlier one: "
            "start it in the rollout, or run its work in contextvars.copy_context()",
        )
    return attempt


def calling_attempt() -> ActiveAttempt | None:
    """The same for a model call, which a thread that may belong to another rollout makes without losing anything."""
    return _find()[0]


def attempt_in_context() -> ActiveAttempt | None:
    """The rollout of this very context, else the one in which this thread was started, while that goes on."""
    attempt = _current.get()
    if attempt is None and (starter := starter_here()) is not None:
        attempt = starter.attempt
    return attempt


def _find() -> tuple[ActiveAttempt | None, bool]:
    """The rollout this code runs for, and whether there is none because this thread may belong to an earlier one."""
    attempt = attempt_in_context()
    if attempt is not None:
        return attempt, False
    with _lock:
        only = _active[0] if len(_active) == 1 else None
        if only is None or only.knows(threading.get_ident()):
            return only, False
    return None, True


def attempt_of(key: str) -> ActiveAttempt | None:
    """The one active rollout with this key; None without a key."""
    with _lock:
        found = [attempt for attempt in _active if attempt.llm.api_key == key] if key else []
    return found[0] if len(found) == 1 else None


def certain_attempt() -> ActiveAttempt | None:
    """The rollout of this very context, or of a thread that lost it where no call can be another's; else None."""
    attempt = calling_attempt()
    return attempt if attempt is None or attempt.alone else attempt_in_context()


def active() -> bool:
    """Whether any rollout is active in this process."""
    return bool(_active)


def is_gateway(url: Url) -> bool:
    """Whether a URL belongs to the gateway of a rollout that is active in this process."""
    attempts = tuple(_active)
    if not attempts:
        return False
    kind, place = type(url), place_of(url)
    return any(attempt.gateway.covers(kind, place) for attempt in attempts)


def emit(event: ToolEvent | StepState) -> None:
    """Hand a tool event or a state to the current rollout; adapters get this function. Outside a rollout it does nothing."""
    attempt = current_attempt()
    if attempt is None:
        return
    if isinstance(event, StepState):
        attempt.add_state(event)
    else:
        attempt.add_tool_event(event)


def state(**variables: object) -> None:
    """Tell the state that the next model call is made in, in the agent's own words: `lightning.state(board=board, turn=3)`.

    It is recorded with the id of the next call that this thread or asyncio task makes, or what it starts: a `StepState` of at
    most 4 KB of JSON. Values that JSON cannot say are kept in words. Training does not look at it.

    Outside a rollout this does nothing, so code that is also used without training may keep it.
    """
    attempt = current_attempt()
    if attempt is None:
        log_once("state outside", "lightning.state() was called outside a rollout and did nothing")
        return
    attempt.add_state(StepState(state_of(variables)))


def reward(value: float, name: str = "reward", response_id: str = "") -> None:
    """Give a reward in the middle of a rollout, for the call `response_id` or, if empty, the last call before now.

    The last call is that of this thread or asyncio task and of what it started; while these have made none, of what started
    it. A thread that began without a context (one that C code starts) counts as started by the agent itself;
    where its call is the last, tasks and threads beside it go by the time of the reward. Calls of clients that the tap
    does not know are not seen: where an agent uses both, give the id of the reply.

    Outside a rollout this does nothing, so code that is also used without training may keep it. Raises `DataError` when
    `value` is not a finite number between -1e12 and 1e12.
    """
    what = f"the reward of lightning.reward(name={text_of(name)!r})"
    checked = number(value, what, "give a finite number")
    attempt = current_attempt()
    if attempt is None:
        log_once("reward outside", "lightning.reward() was called outside a rollout and did nothing")
        return
    attempt.add_step_reward(StepReward(checked, name, response_id))


def label(response_id: str, *, agent: str, path: Sequence[str] = ()) -> None:
    """Name the agent that made a model call, after the fact: for clients that neither an adapter nor the tap sees.

    `response_id` is the `id` of the model's reply (also its header `x-request-id`); all choices of the reply get the name.
    `path` runs outermost to innermost, as `train_agents` matches it. A label wins over whatever the call was named when it
    was made, and the last label of a call wins. An id that no call of this rollout has is ignored, with a line in the log.

    Outside a rollout this does nothing, so code that is also used without training may keep it. Raises `DataError` unless
    all are non-empty strings, at most 8192 characters together, and the names are without slashes, which separate the names
    of a path in `train_agents`.
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
    attempt = current_attempt()
    if attempt is None:
        log_once("label outside", "lightning.label() was called outside a rollout and did nothing")
        return
    attempt.add_label(response_id, Caller(agent, names))


def log_once(key: str, message: str, *arguments: object) -> None:
    """Warn the first time; what runs for every call of every agent must not flood the log."""
    with _lock:
        first = _said.first(key)
    if first:
        logger.warning(message, *arguments)
