"""LightningRL: the high level assigns credit to calls; the low level is a single-call algorithm that trains each call.

The invariant: rows are a pure function of the finished groups and of the fields below. Groups keep their order, rollouts
their order within a group and calls their order within a rollout, so the same store gives the same batch, byte for byte.

Agent Lightning, arXiv 2508.03680.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from difflib import get_close_matches
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np

from lightning.algorithms.intake import (
    Intake,
    Overlong,
    are_rounding,
    per_call,
    reason_to_doubt,
    reason_to_skip,
    reward_scale,
    with_rules,
)
from lightning.algorithms.presets import (
    PRESETS,
    Estimator,
    LowLevel,
    Preset,
    Ratio,
    Scaling,
    estimator_of,
    unrounded,
    whiten,
)
from lightning.algorithms.protocol import Batch
from lightning.batch.build import Advantages, Normalization, PerToken
from lightning.batch.trajectory import Group
from lightning.config.arguments import refuse_class, refuses_unknown
from lightning.credit.advantage import all_equal
from lightning.credit.intermediate import ToolReward, check_tool_reward
from lightning.credit.protocol import Credit, GroupAdvantage, group_returns
from lightning.errors import ConfigError
from lightning.losses.correction import Correction, CorrectionKind
from lightning.losses.protocol import KlEstimator, Loss

if TYPE_CHECKING:
    from lightning.losses.policy_gradient import Surrogate

PRESET: Any = None
"""The default of fields that the low level decides. Construction replaces it by the decided value, so that a run's record holds
that."""


@refuses_unknown
@dataclass(frozen=True, slots=True)
class LightningRL:
    """LightningRL: every call of the component of interest is trained with an advantage from its rollout's return in the group.

    `low_level` is the single-call algorithm: `grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce++`,
    `reinforce++_baseline` or `ppo` (docs/algorithms.md compares them). It decides the fields `estimator`, `scaling`, `ratio`,
    `credit`, `clip_low`, `clip_high`, `normalization` and `dynamic_sampling` unless they are given. The object holds the
    decided values, so `dataclasses.replace` with another low level changes little but the name: make a new object.

    A rollout's advantage is its return less a baseline (`estimator`: `mean`, `rloo`, `none`), divided by a deviation
    (`scaling`: `group-std`, `batch-std`, `none`). `group-std` goes with the estimator `mean` alone; with another one its place
    is taken by `none`. `ratio` is that of each `token` or of the whole call (`sequence`), for which clip bounds are much
    narrower.

    `group_size` rollouts are sampled for each task. `credit` spreads a rollout's advantage over its calls: a registered name or
    a function. A credit that names a `head`, as `ppo` requires, makes the engine train this head; its loss is multiplied by
    `value_coefficient`, which has almost no effect unless the head's loss also trains the model. Ratios are
    clipped to [1 - `clip_low`, 1 + `clip_high`]. With the normalization `constant` a rollout's sum over tokens is divided by
    `constant_tokens`. `advantage_eps` is added to deviations. With `dynamic_sampling` the trainer samples more tasks until
    enough groups teach something.

    Rewards are the value that the agent returned, its `lightning.reward`s, and those of its tool runs by `tool_reward`: a
    reward for each status, such as `{"error": -0.1}`, or a function of the `ToolEvent`. Rollouts whose trained calls generate
    more than `overlong_tokens` - `overlong_buffer` tokens lose up to `overlong_penalty`.

    Every low level takes an entropy bonus (`entropy_coefficient`), a penalty on the KL divergence from the model that training
    began with (`kl_coefficient`, `kl_estimator`), and a `correction` of the mismatch between sampler and trainer: an object or
    its kind. By default implausible tokens are masked (`lightning.losses.correction.Correction`).

    A rollout with a recorded call that cannot be trained on is dropped from its group like a failed one, counted by reason and
    logged. Groups that teach nothing are skipped and counted (`lightning.algorithms.intake.reason_to_skip`). So are groups in
    which the credit function gave a trained call an advantage or value target that is not finite or too large for float32
    (`advantage_not_finite`, `advantage_too_large`, `value_target_...`).
    """

    low_level: LowLevel = "grpo"
    _: KW_ONLY
    group_size: int = 8
    estimator: Estimator = PRESET
    scaling: Scaling = PRESET
    ratio: Ratio = PRESET
    credit: str | Credit = PRESET
    tool_reward: ToolReward | None = None
    clip_low: float = PRESET
    clip_high: float = PRESET
    entropy_coefficient: float = 0.0
    normalization: Normalization = PRESET
    constant_tokens: int = 1024
    advantage_eps: float = 1e-4
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k2"
    correction: Correction | CorrectionKind = PRESET
    value_coefficient: float = 0.5
    dynamic_sampling: bool = PRESET
    overlong_tokens: int | None = None
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0

    zero_advantage_teaches: ClassVar[bool] = False
    """Whether the surrogate has a gradient at advantage 0. If so, calls with advantage 0 keep their rows, as they do with an
    entropy bonus or a KL penalty."""

    def __post_init__(self) -> None:
        _one_of("low_level", self.low_level, get_args(LowLevel))
        preset = PRESETS[self.low_level]
        if self.scaling is None and self.estimator not in (None, "mean") and preset.scaling == "group-std":
            object.__setattr__(self, "scaling", "none")
        for name in (field.name for field in fields(Preset) if field.name not in ("surrogate", "ratio")):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(preset, name))
        refuse_class(self.credit, "the credit")
        if not (isinstance(self.credit, str) or callable(self.credit)):
            raise ConfigError(f"credit={self.credit!r}: give a registered name, or a function of a group")
        if self.correction is None:
            object.__setattr__(self, "correction", Correction())
        elif isinstance(self.correction, Mapping):  # read from a run's record
            given = {name: value for name, value in self.correction.items() if name != "type"}
            object.__setattr__(self, "correction", Correction(**given))
        elif not isinstance(self.correction, Correction):
            _one_of("correction", self.correction, get_args(CorrectionKind))
            object.__setattr__(self, "correction", Correction(self.correction))
        self._check_advantage()
        self._check_ratio()
        _one_of("normalization", self.normalization, get_args(Normalization))
        _one_of("kl_estimator", self.kl_estimator, get_args(KlEstimator))
        if self.tool_reward is not None:
            check_tool_reward(self.tool_reward)
        self._check_overlong()
        self._check_numbers()
        if self.low_level == "ppo" and self.credit != PRESETS["ppo"].credit and not self.head:
            raise ConfigError("low_level 'ppo' needs a credit function that uses a head, such as 'critic'")
        if self.group_size < 1:
            raise ConfigError(f"group_size={self.group_size} must be positive")
        if self.group_size == 1 and self._least() > 1:
            raise ConfigError("group_size=1: a rollout is compared with the others of its task, so use 2+")

    def _check_advantage(self) -> None:
        _one_of("estimator", self.estimator, get_args(Estimator))
        _one_of("scaling", self.scaling, get_args(Scaling))
        if self.scaling == "group-std" and self.estimator != "mean":
            why = (
                "it would be GRPO's advantage times a constant" if self.estimator == "rloo" else "there is no baseline"
            )
            raise ConfigError(
                f"estimator={self.estimator!r} with scaling='group-std': {why}. Set scaling='none' or 'batch-std', or "
                "estimator='mean'"
            )
        if self.estimator != PRESETS[self.low_level].estimator and self.head:
            raise ConfigError(
                f"estimator={self.estimator!r} has no effect: the credit {self._credit_name()} takes advantages from the "
                "values of its head. Leave estimator out (dataclasses.replace keeps that of the low level before: make a "
                "new LightningRL), or choose a credit without a head (credit='identical')"
            )

    def _check_ratio(self) -> None:
        """Decide the ratio if it is not given: with a decoupled correction there is none to clip, so it is that of tokens."""
        assert isinstance(self.correction, Correction)
        decoupled = self.correction.decoupled
        if self.ratio is None:
            object.__setattr__(self, "ratio", "token" if decoupled else PRESETS[self.low_level].ratio)
        _one_of("ratio", self.ratio, get_args(Ratio))
        if self.ratio == "sequence" and decoupled:
            raise ConfigError(
                f"ratio='sequence' has no effect with correction={self.correction.kind!r}, whose ratios are against the "
                "trainer itself, and 1: set ratio='token', or correction='mask'"
            )

    def _check_overlong(self) -> None:
        given = [
            f"{name}={getattr(self, name)}"
            for name, default in (("overlong_buffer", 0), ("overlong_penalty", 1.0))
            if getattr(self, name) != default
        ]
        if given and self.overlong_tokens is None:
            raise ConfigError(
                f"{' and '.join(given)} without overlong_tokens punishes nothing: give overlong_tokens, the tokens that a "
                "rollout may generate, too"
            )
        self._overlong()

    def _check_numbers(self) -> None:
        if self.constant_tokens < 1:
            raise ConfigError(f"constant_tokens={self.constant_tokens} must be positive")
        if not 0.0 <= self.clip_low <= 1.0 or not self.clip_high >= 0.0:
            raise ConfigError(f"ratios cannot be clipped to [1 - {self.clip_low}, 1 + {self.clip_high}]")
        if not isfinite(self.entropy_coefficient):
            raise ConfigError(f"entropy_coefficient={self.entropy_coefficient} must be a finite number")
        for name in ("kl_coefficient", "value_coefficient", "advantage_eps"):
            if not 0.0 <= getattr(self, name) < inf:
                raise ConfigError(f"{name}={getattr(self, name)} must be a finite number that is not negative")

    @property
    def name(self) -> str:
        """The registered name whose factory makes this algorithm again from its fields."""
        return "lightning_rl"

    @property
    def head(self) -> str:
        """The head whose values the credit function needs, and which is then trained as well; "" without a head."""
        return str(getattr(self._credit(), "head", None) or "")

    @property
    def loss(self) -> Loss:
        """The policy gradient loss, with the ratios of single tokens or (GSPO) of whole calls."""
        return self.loss_with(PRESETS[self.low_level].surrogate)

    def loss_with(self, surrogate: Surrogate) -> Loss:
        """Return the loss with the settings of this object and another surrogate: `clip`, `cispo`, or a user's function."""
        from lightning.losses.policy_gradient import (
            CallCorrected,
            ClippedPolicyGradient,
            PreparedPolicyGradient,
            SequencePolicyGradient,
        )

        assert isinstance(self.correction, Correction)
        kind: type[ClippedPolicyGradient] = ClippedPolicyGradient
        if self.ratio == "sequence" and isinstance(surrogate, str):
            kind = SequencePolicyGradient
        elif hasattr(surrogate, "prepare"):
            kind = PreparedPolicyGradient
        elif self.correction.level != "token":
            kind = CallCorrected
        return kind(
            self.clip_low,
            self.clip_high,
            self.entropy_coefficient,
            surrogate,
            self.kl_coefficient,
            self.kl_estimator,
            self.correction,
        )

    def teaches(self, group: Group) -> bool:
        """Whether a group teaches something, for dynamic sampling: it has enough rollouts that can be trained on and, if the
        low level compares rollouts, returns or advantages that differ. Needs no values of states.

        They must differ before overlong answers are punished, too (`_rewarded`). For the same reason equal returns teach only
        if step rewards make the calls' advantages differ, even where a discount makes advantages depend on lengths. A credit
        function with rewards of its own is not called here, since that may take long: its groups with equal returns count as
        teaching.
        """
        rewarded = self._rewarded(Intake().sound(group))
        reason = reason_to_skip(group, rewarded, least=self._least())
        if reason == "all_rewards_equal" and self._adds_rewards():
            return True
        if reason == "all_rewards_equal" and any(member.step_rewards for member in rewarded.trajectories):
            reason, _ = self._told_apart(rewarded)
        return not reason

    def batch(self, groups: Sequence[Group]) -> Batch:
        """Return the step's rows. Raises `DataError` for a reward that is not finite, and for a credit function that does not
        give one advantage for each call."""
        intake, head = Intake(), self.head
        every = bool(head or self.entropy_coefficient or self.kl_coefficient or self.zero_advantage_teaches)
        credited: list[_Credited] = []
        self._prefetch(groups)
        for group in groups:
            whole = intake.sound(group)
            reason, found = self._weighed(group, whole)
            if reason:
                intake.skip(reason)
            if not reason:
                credited.append(found)
            elif reason == "all_rewards_equal" and every and not self.dynamic_sampling:
                credited.append(_level(whole))  # a KL penalty and an entropy bonus do not depend on rewards
        if self.scaling == "batch-std":
            taught = sum(not group.level for group in credited)
            credited = self._whitened(credited)
            if taught and not head and not any(map(_teaches, (group.advantages for group in credited))):
                intake.skip("all_rewards_equal", taught)
                credited = credited if every else []
        trajectories = [member for group in credited for member in group.group.trajectories]
        advantages = [values for group in credited for values in group.advantages]
        targets = [values for group in credited for values in group.targets]
        made = intake.batch(
            trajectories,
            advantages,
            normalization=self.normalization,
            constant_tokens=self.constant_tokens,
            drop_zero_advantages=not every,
            value_targets=targets if head else None,
            value_coefficient=self.value_coefficient,
        )
        # Not `loss=self.loss`: that imports torch, which an audit does not need. `Batch.loss_for` finds the loss by `algorithm`
        # when a user's algorithm passes this batch on.
        return replace(made, algorithm=self)

    def _weighed(self, found: Group, whole: Group) -> tuple[str, _Credited]:
        """Return the reason why a group teaches nothing, or "", and the group with its calls' advantages. `whole` is the group
        `found` without the rollouts that `Intake.sound` dropped."""
        rewarded = self._rewarded(whole)
        reason = reason_to_skip(found, rewarded, least=self._least())
        plain: list[list[PerToken]] = []
        if reason == "all_rewards_equal":
            reason, values = self._told_apart(rewarded)
            return reason, _Credited(whole, values)
        if not reason and self._overlong() is not None and not self.head:
            bare = with_rules(whole, self.tool_reward)
            if self._adds_rewards() and self._compares() and all_equal(group_returns(bare)):
                reason, _ = self._told_apart(bare)
            plain = [] if self._compares() else self._credited(bare, self._estimator())
        if reason:
            return reason, _Credited(whole, [])
        values = self._credited(rewarded, self._estimator())
        reason = reason_to_doubt(rewarded, values)
        targets: list[list[float]] = []
        if self.head and not reason:
            targets = self._value_targets(rewarded)
            reason = reason_to_doubt(rewarded, targets, "value_target")
        return reason, _Credited(whole, values, targets, plain)

    def _whitened(self, credited: Sequence[_Credited]) -> list[_Credited]:
        """Return the groups with their advantages normalised over all groups that teach. If no advantage differs before
        overlong answers are punished, the advantages without the punishment are taken, which become 0."""
        taught = [group for group in credited if not group.level]
        members = [member for group in taught for member in group.group.trajectories]

        def over(parts: Sequence[Advantages]) -> list[list[PerToken]]:
            own = [values for part in parts for values in part]
            return whiten(members, own, eps=self.advantage_eps, trained_alone=bool(self.head))

        found = over([group.advantages for group in taught])
        if taught and all(group.plain for group in taught):
            plain = over([group.plain for group in taught])
            found = found if _teaches(plain) else plain
        left = iter(found)
        return [
            group if group.level else replace(group, advantages=[next(left) for _ in group.group.trajectories])
            for group in credited
        ]

    def _prefetch(self, groups: Sequence[Group]) -> None:
        """Call the credit function's `prefetch`, if it has one, with all groups that it will be called with in this step."""
        prefetch = getattr(self._credit(), "prefetch", None)
        if prefetch is not None:
            pairs = [(group, self._rewarded(Intake().sound(group))) for group in groups]
            least, asked = self._least(), ("", "all_rewards_equal")
            prefetch([made for group, made in pairs if reason_to_skip(group, made, least=least) in asked])

    def _told_apart(self, group: Group) -> tuple[str, list[list[PerToken]]]:
        """Return, for a group whose returns are all equal, the reason why it teaches nothing, or "" if the credit function
        gives its calls different advantages; and the advantages."""
        try:
            values = self._credited(group, unrounded(self._estimator(), reward_scale(group)))
        except ZeroDivisionError:  # a credit function in plain Python divided by the deviation of equal rewards
            return "all_rewards_equal", []
        return "all_rewards_equal" if are_rounding(group, values) else reason_to_doubt(group, values), values

    def _credited(self, group: Group, estimator: GroupAdvantage) -> list[list[PerToken]]:
        """Return each call's advantage by the credit function, or those of its tokens, for each trajectory."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # `reason_to_doubt` skips what overflows
            return per_call(group, self._credit()(group, estimator), self._credit_name())

    def _value_targets(self, group: Group) -> list[list[float]]:
        """Return the value that the head should learn for each call's state, for each trajectory. Raises `ConfigError` if the
        credit function has no `value_targets`."""
        targets = getattr(self._credit(), "value_targets", None)
        if targets is None:
            raise ConfigError(
                f"the credit function {self._credit_name()} names a `head`, but has no method value_targets(trajectory) "
                "that returns the values for the head to learn"
            )
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            given = [targets(trajectory) for trajectory in group.trajectories]
        found = per_call(group, given, f"{self._credit_name()} (value_targets)", "value target", by_token=False)
        return [[float(value) for value in own] for own in found]

    def _rewarded(self, group: Group) -> Group:
        """Return the group with the rewards of tool runs and the punishment of overlong answers.

        If rollouts are compared and their returns are equal without the punishment, it is left out. Otherwise the smallest
        penalty would be divided by its own deviation, and be as large as any advantage. Likewise DAPO's constraint (arXiv
        2503.14476, equation 11) is on right and wrong answers, not on lengths, and verl filters groups by the unshaped score.
        With a credit function that has rewards of its own, `_weighed` checks this, because it takes a call of the function.
        """
        plain = with_rules(group, self.tool_reward)
        told_by_rewards = self._compares() and not self._adds_rewards()
        if self._overlong() is None or (told_by_rewards and all_equal(group_returns(plain))):
            return plain
        return with_rules(group, self.tool_reward, self._overlong())

    def _overlong(self) -> Overlong | None:
        if self.overlong_tokens is None:
            return None
        return Overlong(self.overlong_tokens, self.overlong_buffer, self.overlong_penalty)

    def _least(self) -> int:
        """Return the least number of rollouts in a group that teaches something: 2, or 1 if rollouts are not compared."""
        return 2 if self._compares() else 1

    def _compares(self) -> bool:
        """Whether advantages come from comparing the rollouts of a group; with a head or plain REINFORCE they do not."""
        return not (self.estimator == "none" or self.head)

    def _adds_rewards(self) -> bool:
        """Whether the credit function adds rewards of its own, as a judge does."""
        return bool(getattr(self._credit(), "rewards", False))

    def _estimator(self) -> GroupAdvantage:
        return estimator_of(self.estimator, self.scaling, self.advantage_eps)

    def _credit(self) -> Credit:
        from lightning.plugins import plugins

        return plugins().credit(self.credit)

    def _credit_name(self) -> str:
        """Return the name of the credit function for messages."""
        if isinstance(self.credit, str):
            return repr(self.credit)
        return getattr(self.credit, "__qualname__", repr(self.credit))


@dataclass(frozen=True, slots=True)
class _Credited:
    """A group with the advantages of its calls, for each trajectory. `targets` are the values that a head should learn; empty
    without a head. `plain` are the advantages before overlong answers are punished, if the
    normalisation over the step needs them, else empty. `level` marks a group whose rewards are all equal."""

    group: Group
    advantages: Advantages
    targets: Sequence[Sequence[float]] = ()
    plain: Advantages = ()
    level: bool = False


def _teaches(advantages: Advantages) -> bool:
    """Whether an advantage is not 0."""
    return any(np.any(value) for values in advantages for value in values)


def _level(group: Group) -> _Credited:
    """Return the group with all advantages 0, marked as `level`, for a group whose rewards are all equal."""
    return _Credited(group, [np.zeros(len(member.transitions)) for member in group.trajectories], level=True)


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        close = get_close_matches(str(value).lower(), allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown {field} {value!r}: use one of {', '.join(allowed)}{hint}")
