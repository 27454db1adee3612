"""The nouns of lightning: plain frozen values that every room passes around.

Nothing here imports anything but the standard library and the errors, and nothing here is ever changed in place. The module
`recorded` (what an attempt leaves behind, and what that is made of) is a part of it: import its nouns from here.
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
    POLICY,
    ROLLOUT_HEADER,
    SERVED,
    TOO_LONG,
    UNNAMED,
    UNSERVED,
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
    "POLICY",
    "ROLLOUT_HEADER",
    "SERVED",
    "TOO_LONG",
    "UNNAMED",
    "UNSERVED",
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
    "Token",
    "TokenIds",
    "ToolEvent",
    "Transition",
    "VersionRun",
    "as_texts",
    "by_key",
    "logprobs",
    "new_id",
    "not_json",
    "shared_prefix",
    "token_ids",
]

DEFAULT_PROJECT = "default"
"""The project of runs and tokens for which none was named."""


def new_id(prefix: str) -> str:
    """A fresh, unguessable id such as `run-1f0c...`."""
    return f"{prefix}-{uuid.uuid4().hex[:16]}"


class Status(StrEnum):
    """Where a rollout stands.

    pending -> running -> succeeded | failed; running -> pending again when an attempt was lost and may be retried.
    """

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether it stays so."""
        return self in (Status.SUCCEEDED, Status.FAILED)


class Fault(StrEnum):
    """Whose fault an unsuccessful attempt was; only `INFRASTRUCTURE` is retried. `POLICY`: the model's own, such as an answer
    that never came to an end; `trainer.policy_fault` says what training makes of it."""

    AGENT = "agent"
    POLICY = "policy"
    TIMEOUT = "timeout"
    INFRASTRUCTURE = "infrastructure"


class Scope(StrEnum):
    """What the holder of a token may do: all of it; train; run agents; look."""

    ADMIN = "admin"
    TRAINER = "trainer"
    RUNNER = "runner"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of work. `input` is whatever the agent needs (JSON); `expected` is for the grader, never shown to the model.

    `id` defaults to a hash of the content, so the same task has the same id in every process. Raises `DataError`, naming
    the place, for what JSON cannot hold: a task travels to other processes and lies in the store.
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
    """What an agent needs to call the policy: give these three to any OpenAI-compatible client.

    `api_key` is a signed token that belongs to one attempt of one rollout and expires with it. `prompts` are the prompt
    templates that components have in this rollout, by the component's name, where they are not the agent's own. `seed` follows
    from the run's seed, the rollout's place in the run, its task and the attempt; an agent may seed generators of its own with
    it. It is None where agents are not seeded (`runner.seed_agents`). `extras` are what plugins' stages in the gateway tell
    those of the same names around the attempt.
    """

    base_url: str
    api_key: str
    model: str
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    seed: int | None = None
    extras: Mapping[str, Json] = field(default_factory=dict, hash=False)

    @property
    def url_with_token(self) -> str:
        """A base URL that carries the token itself, for clients that take a URL but no key."""
        root = self.base_url.removesuffix("/v1")
        return f"{root}/r/{self.api_key}/v1"


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of the agent on one task. `group` ties the n rollouts of one task together (GRPO).

    `reward` is set only by a successful attempt. `step` is the optimizer step the rollout was sampled for, from 1, in
    asynchronous training the one that was next when it began (a later one may take it); of an evaluation, after how many
    steps it is. `split` is `train` or the name of an evaluation.
    `rewards` keeps named parts when the agent returned several. `resources` are the versions of the named resources that it
    runs with. A branch has a `parent`, the key `(rollout, attempt, seq)` of a call of another rollout: the agent's calls that
    were answered before that one was sent are answered from its record, and the branch has its own calls from there on.
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
    """The right to run one attempt until `expires_at` (the database's clock). `rollout.attempt` is the fencing token."""

    rollout: Rollout
    worker: str
    expires_at: float

    @property
    def attempt(self) -> int:
        """The fencing token."""
        return self.rollout.attempt


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. Exactly one of `reward` (the reward function saw a result) and `fault` is set.

    `labels` says who made which calls, by response id, as the agent said it with `lightning.label`. `extras` are bytes of
    plugins by the plugin's name.
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
    extras: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """One training or evaluation run; `config` is the resolved configuration it was started with.

    Whoever may see one `project` sees its runs and nothing of the others.
    """

    id: str
    name: str
    config: Mapping[str, Json] = field(default_factory=dict)
    created_at: float = 0.0
    project: str = DEFAULT_PROJECT


@dataclass(frozen=True, slots=True)
class Token:
    """The right of a person or a program to use the control API in one project. The secret itself is kept nowhere.

    `digest` is the SHA-256 (hexadecimal) of the secret. Times are Unix seconds; one without `expires_at` lives until it is
    revoked. A `project` of `*` means all of them.
    """

    id: str
    scope: Scope
    digest: str
    project: str = DEFAULT_PROJECT
    name: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed optimizer step, counted from 1: the proof of what was trained.

    `rollouts` are `(rollout id, attempt)` in training order, `digests` the SHA-256 of what each of them recorded (ids,
    logprobs, rewards, versions) in the same order, and `digest` covers the rows they became, with their advantages.
    `policy_version` is the version of the weights of `policy` that this step produced: `step` itself. `groups` are all groups
    that the step looked at, in order, those without a trained rollout included. `checkpoint` is the newest training state
    that was on disk when the step was committed; empty: none was. `context` says how the step was computed
    (`lightning.trainer.context`): by which weights it was sampled, under which settings, on what machine. `extras` are bytes of
    plugins by the plugin's name.
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
