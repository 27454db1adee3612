"""The common types of lightning: plain frozen values that all its parts exchange.

The module imports nothing but the standard library and the errors, and no value is ever changed in place. The types of the
module `recorded` (the records of an attempt) belong to it: import them from here.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence  # noqa: F401 — type hints resolve `Json` here
from dataclasses import dataclass, field
from enum import StrEnum

from lightning.errors import DataError
from lightning.types.recorded import (
    BRANCH_VOID,
    CALLER_HEADER,
    CONVERSATION_ID,
    EXPIRED,
    GREEDY_BELOW,
    LONGEST_REASON,
    NO_ADAPTER,
    POLICY,
    REJECTED,
    REJECTED_HEADER,
    ROLLOUT_HEADER,
    SERVED,
    TOO_LONG,
    UNNAMED,
    UNSERVED,
    UNTRAINED_HEADER,
    Caller,
    CallStatus,
    Conversation,
    Json,
    LogProbs,
    Span,
    StepReward,
    StepState,
    TokenIds,
    ToolEvent,
    Transition,
    VersionRun,
    as_texts,
    by_key,
    logprobs,
    not_json,
    read_reason,
    shared_prefix,
    token_ids,
)

__all__ = [
    "BRANCH_VOID",
    "CALLER_HEADER",
    "CONVERSATION_ID",
    "DEFAULT_PROJECT",
    "EXPIRED",
    "GREEDY_BELOW",
    "LLM",
    "LONGEST_REASON",
    "NO_ADAPTER",
    "POLICY",
    "REJECTED",
    "REJECTED_HEADER",
    "ROLLOUT_HEADER",
    "SERVED",
    "TOO_LONG",
    "UNNAMED",
    "UNSERVED",
    "UNTRAINED_HEADER",
    "CallStatus",
    "Caller",
    "Conversation",
    "Fault",
    "Json",
    "Lease",
    "LogProbs",
    "Outcome",
    "Rollout",
    "Run",
    "Scope",
    "Span",
    "Status",
    "StepRecord",
    "StepReward",
    "StepState",
    "Task",
    "TokenIds",
    "ToolEvent",
    "Transition",
    "VersionRun",
    "as_texts",
    "by_key",
    "logprobs",
    "new_id",
    "not_json",
    "read_reason",
    "shared_prefix",
    "token_ids",
]

DEFAULT_PROJECT = "default"
"""The project of runs and tokens that do not name one."""


def new_id(prefix: str) -> str:
    """Return a fresh, unguessable id with a prefix, such as `run-1f0c...`."""
    return f"{prefix}-{uuid.uuid4().hex[:16]}"


class Status(StrEnum):
    """The state of a rollout.

    pending -> running -> succeeded | failed | cancelled; running -> pending again if an attempt was lost and may be retried. A
    cancelled rollout has neither succeeded nor failed: nobody wanted it any more (`Fault.CANCELLED`).
    """

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the state is final: succeeded, failed or cancelled."""
        return self not in (Status.PENDING, Status.RUNNING)


class Fault(StrEnum):
    """The cause of an unsuccessful attempt; only `INFRASTRUCTURE` is retried. `POLICY` means the model's own fault, such as an
    endless answer; `trainer.policy_fault` decides how training treats it. `CANCELLED` means that nobody wanted the rollout any
    more, which is no failure (`Status.CANCELLED`)."""

    AGENT = "agent"
    POLICY = "policy"
    TIMEOUT = "timeout"
    INFRASTRUCTURE = "infrastructure"
    CANCELLED = "cancelled"

    @property
    def is_loss(self) -> bool:
        """Whether it says nothing about the agent and the policy."""
        return self in (Fault.INFRASTRUCTURE, Fault.CANCELLED)


class Scope(StrEnum):
    """The rights of a token at the control API: `ADMIN` everything, `TRAINER` train, `RUNNER` run agents, `VIEWER` read."""

    ADMIN = "admin"
    TRAINER = "trainer"
    RUNNER = "runner"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class Task:
    """One task for the agent. `input` is the agent's input (JSON); `expected` is for the grader, and never shown to the model.

    `id` defaults to a hash of the content, so the same task has the same id in every process. Raises `DataError`, naming the
    place, for a value that JSON cannot hold, because tasks are sent to other processes and kept in the store.
    """

    input: Json
    expected: Json = None
    metadata: Mapping[str, Json] = field(default_factory=dict)
    id: str = ""

    def __post_init__(self) -> None:
        called = f"task {self.id!r}" if self.id else "a task"
        if not isinstance(self.metadata, Mapping):
            raise DataError(
                f"{called}: its metadata is a {type(self.metadata).__qualname__}; give a mapping from strings"
            )
        content = {"input": self.input, "expected": self.expected, "metadata": dict(self.metadata)}
        for name, value in content.items():
            if found := not_json(value):
                place, problem = found
                raise DataError(
                    f"{called} is not JSON: its {name}{place[:60]} {problem}. Put only null, booleans, finite numbers, "
                    "strings, lists and mappings from strings in a task, and build other objects inside the agent"
                )
        if not self.id:
            text = json.dumps(list(content.values()), sort_keys=True)
            object.__setattr__(self, "id", "task-" + hashlib.sha256(text.encode()).hexdigest()[:16])


@dataclass(frozen=True, slots=True)
class LLM:
    """The address of the policy for one agent: give `base_url`, `api_key` and `model` to any OpenAI-compatible client.

    `api_key` is a signed token that belongs to one attempt of one rollout and expires with it. `prompts` are the prompt
    templates that replace the agent's own in this rollout, by the component's name. `seed` is computed from the run's seed, the
    rollout's place in the run, its task and the attempt; an agent may seed its own generators with it. It is None if agents are
    not seeded (`runner.seed_agents`). `extras` are values that a plugin's stage in the gateway passes to the plugin's stage of
    the same name around the attempt.
    """

    base_url: str
    api_key: str
    model: str
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    seed: int | None = None
    extras: Mapping[str, Json] = field(default_factory=dict, hash=False)

    @property
    def url_with_token(self) -> str:
        """The base URL with the token in its path, for clients that take a URL but no key."""
        root = self.base_url.removesuffix("/v1")
        return f"{root}/r/{self.api_key}/v1"


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of the agent on one task. `group` is shared by the n rollouts of one task (GRPO).

    `reward` is set only by a successful attempt; `rewards` are its named parts if the agent returned several. `step` is the
    optimizer step that the rollout was sampled for, counted from 1; in asynchronous training it is the step that was next when
    the rollout began, and a later step may train it; for an evaluation it is the number of steps before it. `split` is `train`
    or the name of an evaluation. `resources` are the versions of the named resources that it uses. A branch has a `parent`, the
    key `(rollout, attempt, seq)` of a call of another rollout: it repeats the calls that were answered before that call was
    sent, with their recorded answers, and makes its own calls from there on.
    """

    id: str
    run: str
    task: Task
    group: str
    step: int = 0
    split: str = "train"
    index: int = 0
    max_attempts: int = 2
    status: Status = Status.PENDING
    attempt: int = 0
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    fault: Fault | None = None
    error: str = ""
    seconds: float = 0.0
    trained_at_step: int | None = None
    resources: Mapping[str, int] = field(default_factory=dict)
    parent: tuple[str, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one worker to run an attempt until `expires_at` (the database's clock). `rollout.attempt` is the fencing
    token."""

    rollout: Rollout
    worker: str
    expires_at: float

    @property
    def attempt(self) -> int:
        """The number of the attempt, the fencing token: a store refuses reports of an older attempt."""
        return self.rollout.attempt


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attempt. Exactly one of `reward` (the agent returned one) and `fault` is set.

    `labels` are the callers that the agent gave to calls by `lightning.label`, by response id. `untrained` are the reasons why
    calls are not trained that became known after them (`lightning.reject`), by response id. `extras` are bytes of plugins, by
    the plugin's name.
    """

    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    fault: Fault | None = None
    error: str = ""
    seconds: float = 0.0
    tool_events: tuple[ToolEvent, ...] = ()
    step_rewards: tuple[StepReward, ...] = ()
    labels: Mapping[str, Caller] = field(default_factory=dict)
    step_states: tuple[StepState, ...] = ()
    untrained: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """One training or evaluation run; `config` is the resolved configuration that it was started with.

    A token for one `project` gives access to the project's runs and to no others.
    """

    id: str
    name: str
    config: Mapping[str, Json] = field(default_factory=dict)
    created_at: float = 0.0
    project: str = DEFAULT_PROJECT


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one committed optimizer step, counted from 1, which proves what was trained.

    `rollouts` are the trained `(rollout id, attempt)` in training order, `digests` the SHA-256 of the record of each (ids,
    logprobs, rewards, versions) in the same order, and `digest` that of the rows made of them, with their advantages.
    `policy_version` is the version of the weights of `policy` that this step produced, the same number as `step`. `groups` are
    all groups that the step considered, in order, also those without a trained rollout. `checkpoint` is the newest training
    state that was on disk when the step was committed; empty if there was none. `context` says how the step was computed
    (`lightning.trainer.context`): the weights that sampled it, the settings and the machine. `extras` are bytes of plugins, by
    the plugin's name.
    """

    run: str
    step: int
    policy_version: int
    rollouts: tuple[tuple[str, int], ...]
    digests: tuple[str, ...]
    digest: str
    checkpoint: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    at: float = 0.0
    groups: tuple[str, ...] = ()
    context: Mapping[str, Json] = field(default_factory=dict)
    policy: str = POLICY
    extras: Mapping[str, bytes] = field(default_factory=dict)
