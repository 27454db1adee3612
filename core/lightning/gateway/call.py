"""A model call as one object, from the agent's request to the durable transition.

The invariant: each phase adds one typed result and changes none of an earlier phase: what was asked (`Request`), what the
policy server was sent (`Sent`), what it answered (`Answer`), what is kept (transitions). A `Request` holds the bytes of a body,
which may be megabytes: it is gone when the call has been sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.types import Scope

from lightning.gateway.dialects import Capture, Dialect, Plan, Translator
from lightning.gateway.http import Body, Header
from lightning.gateway.identity import Claims
from lightning.gateway.policy import LiveCall, Policy
from lightning.gateway.recorder import Ticket
from lightning.types import Caller, CallStatus


@dataclass(frozen=True, slots=True)
class Request:
    """What an agent asks. `body` is the JSON object of `payload`: whoever wants another one makes a copy. `model` is the model
    that the agent names, of any type."""

    scope: Scope
    payload: bytes
    body: Body
    model: object


@dataclass(frozen=True, slots=True)
class Sent:
    """What the policy server is asked: its body and what of the answer is the agent's (`plan`), who translates the answer, the
    call's numbers in the record, and what its tokens' versions are found by."""

    plan: Plan
    translator: Translator | None
    ticket: Ticket
    live: LiveCall


@dataclass(slots=True)
class Answer:
    """The end of a call: of an answer that was read whole all of it, of a stream its tail. `status` is that of HTTP, 0 where
    the agent gets no answer."""

    status: int
    body: bytes = b""
    headers: list[Header] = field(default_factory=list)
    outcome: CallStatus = CallStatus.OK


@dataclass(slots=True, eq=False, weakref_slot=True)
class Call:
    """One model call.

    Known when it is admitted: the `dialect` it is made in, the agent that calls, the attempt it belongs to, the `policy` that
    answers. At `admitted` a stage may set `claims` (the attempt), `policy`, `before` (the chat messages before those of
    the request), `id_mark` (which the id of its answer begins with), `lineage` (the attempt whose earlier responses the request
    may go on with). `withheld` says why a stream is shown to the agent at once, when its versions are settled ("a branch"), and
    not as it comes. `readers` are given each chunk of a stream as the agent sees it; what one raises is its
    stage's failure, but for an `UpstreamError` (the chunk is not shaped like one). `extras` are stored with the call, by the
    name of the plugin.

    `started` says that the first bytes of the answer have left, `stopped_by` which stage refused the call or failed on it.
    """

    dialect: Dialect
    caller: Caller
    claims: Claims
    find_policy: Callable[[], Policy]
    headers: list[tuple[str, str]]
    before: Sequence[Body] = ()
    id_mark: str = ""
    lineage: tuple[str, int] | None = None
    withheld: str = ""
    readers: list[Callable[[Body], None]] = field(default_factory=list)
    extras: dict[str, bytes] = field(default_factory=dict)
    started: bool = False
    stopped_by: str = ""
    _policy: Policy | None = None
    _sent: Sent | None = None

    @property
    def policy(self) -> Policy:
        """Whose servers answer it. A call that a stage answers by itself has none. Raises `RefusalError`."""
        if self._policy is None:
            self._policy = self.find_policy()
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def attempt(self) -> tuple[str, int]:
        """The rollout and the attempt that it belongs to."""
        return self.claims.rollout, self.claims.attempt

    @property
    def is_planned(self) -> bool:
        """Whether it is known what the policy server is asked, so that the call has its numbers in the record."""
        return self._sent is not None

    @property
    def sent(self) -> Sent:
        """What the policy server is asked. Raises `LookupError` before that is known."""
        if self._sent is None:
            raise LookupError("the call has not been planned: a stage looks at `call.sent` from `sending` on")
        return self._sent

    @sent.setter
    def sent(self, sent: Sent) -> None:
        self._sent = sent

    @property
    def plan(self) -> Plan:
        """See `Sent`."""
        return self.sent.plan

    @property
    def translator(self) -> Translator | None:
        """See `Sent`."""
        return self.sent.translator

    @property
    def ticket(self) -> Ticket:
        """See `Sent`."""
        return self.sent.ticket

    @property
    def live(self) -> LiveCall:
        """See `Sent`."""
        return self.sent.live

    @property
    def capture(self) -> Capture:
        """What the answer has shown so far."""
        return self.sent.live.capture

    @property
    def wants_packed(self) -> bool:
        """Whether nobody but the record wants the logprobs, and of the sampled tokens alone: no text has to be made of them."""
        plan = self.plan
        body = plan.body
        others = body.get("echo") or body.get("logprob_token_ids") or body.get("prompt_logprobs") is not None
        return not (plan.keep_logprobs or others)
