"""The parent of branches: find it in a store, check that it can be branched at a call, and derive the branches' settings.

The invariant: a rollout that cannot be branched is refused here, before anything is started. A recorded setting that the
branches cannot keep is named in a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lightning.config import Config, config_model, recorded_config, with_settings
from lightning.config.fields import find
from lightning.config.other_words import did_you_mean
from lightning.errors import ConfigError, DataError
from lightning.gateway.dialects import ALIASES, NEUTRAL, TOKEN_LIMITS
from lightning.plugins import plugins
from lightning.safe_text import counted
from lightning.store.places import run_id_of, store_in
from lightning.store.url import parse, redacted
from lightning.trainer.model import check_one_model, policies_of, with_one_policy
from lightning.trainer.plan import TRAIN
from lightning.types import Rollout, Run
from lightning_proof.bring_forward import MACHINE_SETTINGS

from lightning_branching.recorded import Prefix, RecordedCall, prefix_of, version_of
from lightning_branching.replay_command import Found, found_at

SAMPLING: Final = ("temperature", *NEUTRAL, *TOKEN_LIMITS, "seed")
"""The sampling parameters that the user may set for the new calls of branches."""
WHOLE: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(TOKEN_LIMITS, (1, 2**31 - 1)),
    "min_tokens": (0, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
}
"""The least and the greatest value that vLLM accepts for each sampling parameter that is a whole number."""
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, math.inf),
}
"""The least and the greatest value of the other sampling parameters."""
POSITIVE: Final = ("top_p", "repetition_penalty")
"""The parameters in `RANGES` that may not be 0."""
USED: Final[Mapping[str, tuple[str, ...]]] = {
    "trainer": ("seed", "eval_temperature", "project", "max_staleness"),
    "engine": ("dtype", *MACHINE_SETTINGS),
    "optimizer_model": (),
}
"""The settings that branches use of these sections. Of every other section they use all settings, except `runner.prompts`."""
RECORDED: Final = (
    "engine.dtype",
    "gateway.hosted_tools",
    "gateway.override_sampling",
    "gateway.seed_calls",
    "policy_server.dtype",
    "policy_server.max_model_len",
    "policy_server.reasoning_parser",
    "policy_server.tool_call_parser",
    "runner.adapters",
    "runner.reroute",
    "runner.seed_agents",
    "runner.timeout",
    "runner.tool_limits",
    "trainer.eval_temperature",
    "trainer.seed",
)
"""The settings that branches take from the parent's run: how its calls were sampled and its agents ran. A record may come from
a stranger, so a setting that names a file, a module, a program, a host to reach or a variable is never taken from it.
(`runner.reroute` names hosts that are *not* reached.)"""
CALLER_ONLY: Final = ("gateway.providers", "policy_server.args", "runner.preload", "runner.sandbox")
"""Settings that a branch may need as its parent had them, but that only the user may set; see `RECORDED`."""
INSTEAD: Final = "leave --live out (live=False): then a vLLM is started with the weights that answered the call"
"""The cure in errors that say that the policy of the parent's run cannot answer."""


@dataclass(frozen=True, slots=True)
class Parent:
    """A rollout that can be branched at the call `at`. `url` is the URL of its store, `folder` the folder of its run; None if
    that is not on this machine."""

    url: str
    folder: Path | None
    found: Found
    run: Run
    at: RecordedCall
    prefix: Prefix

    @property
    def rollout(self) -> Rollout:
        """The rollout, with the attempt that is branched."""
        return self.found.recorded.rollout

    @property
    def version(self) -> int:
        """The version of the policy that answered the call. Of several policies it is that of the trained ones, which is also
        the one to serve for a call of an untrained policy: the nearest call of a trained one says it."""
        trained, at = policies_of(self.run.config), self.at
        calls = sorted(self.found.recorded.calls, key=lambda call: abs(call.number - at.number))
        known = (call.transition for call in calls if not trained or call.transition.policy in trained)
        return version_of(next(known, replace(at.transition, versions=())), self.rollout)


def find_parent(where: str, rollout: str, attempt: int | None, at: int) -> Parent:
    """Find a rollout in the stores at the place `where`, to branch at its call number `at` (from 1). Raises `ConfigError` if no
    store has it, `DataError` if it cannot be branched at that call."""
    if where.startswith(("http://", "https://")):
        raise ConfigError(
            f"{redacted(where)} is a Lightning Server, which answers agents itself: branch where its database can be reached"
        )

    def check(known: Rollout) -> None:
        if known.parent is not None:
            raise DataError(f"the rollout {rollout} is a branch of {known.parent[0]}: branch that one")
        if not known.status.ended and attempt in (None, known.attempt):
            raise DataError(f"the rollout {rollout} is {known.status}: branch it when it has ended")

    url, found = found_at(where, rollout, attempt, check=check)
    recorded, name = found.recorded, found.recorded.rollout.id
    count = len(recorded.calls)
    if not 1 <= at <= count:
        calls = counted(count, "call")
        raise DataError(f"the rollout {name} has {calls}, counted from 1: there is no call {at} to branch at")
    call = recorded.calls[at - 1]
    if not call.transition.status.answered:
        raise DataError(
            f"call {at} of the rollout {name} was not answered ({call.transition.status}): branch at another"
        )
    prefix = prefix_of(recorded, call.transition.seq)
    if found.run is None:
        raise DataError(f"the store does not have the run {recorded.rollout.run} of the rollout {name}")
    return Parent(url, folder_of_run(found.run.id, where, url), found, found.run, call, prefix)


def folder_of_run(run: str, where: str, url: str) -> Path | None:
    """Return the folder of a run whose store has the URL `url`, looked for at and in the place `where`; None if it is not
    there."""
    place = Path("runs" if "://" in where else where)
    candidates = [place, *sorted(place.iterdir())] if place.is_dir() else [place.parent]
    if (file := file_at(where)) is not None:
        candidates.insert(0, file.parent)
    known = (each for each in candidates if store_in(each) and run_id_of(each) == run)
    return next((each.resolve() for each in known if _same(store_in(each), url)), None)


def file_at(place: str) -> Path | None:
    """Return the database file that a place names by its path or by an SQLite URL; None for a folder and for other URLs."""
    if "://" in place:
        where = parse(place)
        return Path(where.path) if where.scheme == "sqlite" else None
    return Path(place) if Path(place).is_file() else None


def _same(one: str, other: str) -> bool:
    """Whether two URLs name the same store."""
    if parse(one).scheme == parse(other).scheme == "sqlite":
        return Path(parse(one).path).resolve() == Path(parse(other).path).resolve()
    return redacted(one) == redacted(other)


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an unknown sampling parameter, and for a value outside of its range."""
    for name, value in sampling.items():
        if name not in SAMPLING:
            raise ConfigError(
                f"--set {name}: no sampling parameter{did_you_mean(name, SAMPLING)} (they are {', '.join(SAMPLING)}); a "
                "setting is written section.field=value"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"--set {name}={value}: give a number")
        if name in WHOLE:
            least, greatest = WHOLE[name]
            if not isinstance(value, int) or not least <= value <= greatest:
                raise ConfigError(f"--set {name}={value}: give a whole number from {least} to {greatest}")
            continue
        low, high = RANGES[name]
        if not low <= value <= high or value == math.inf or (value == 0 and name in POSITIVE):  # nan is in no range
            bound = f"above {low:g}" if name in POSITIVE else f"from {low:g}"
            raise ConfigError(
                f"--set {name}={value}: give a number {bound}{f' to {high:g}' if high < math.inf else ''}"
            )


def unused(settings: Mapping[str, object], *, live: bool = False) -> str:
    """Return a warning that names the given settings (by dotted names) that branches do not use; empty if they use all. With
    `live` no vLLM is started, so that settings of `policy_server` have no use."""
    given = {name for key, value in settings.items() for name in _leaves(key, value)}
    names = sorted(name for name in given if not _uses(name) or (live and name.startswith("policy_server.")))
    return (
        f"{', '.join(names)}: branches do not use {'these settings' if len(names) > 1 else 'this setting'}"
        if names
        else ""
    )


def _leaves(key: str, value: object) -> Iterator[str]:
    if not isinstance(value, Mapping) or not value:
        yield key
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name}", inner)


def _uses(name: str) -> bool:
    """Whether branches use a setting. True for an unknown setting, which is refused elsewhere."""
    section, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    return (
        not rest
        or find(name) is None
        or (first in USED[section] if section in USED else (section, first) != ("runner", "prompts"))
    )


def config_of(
    parent: Parent,
    sampling: Mapping[str, float | int],
    configure: Callable[[Config], Config],
    *,
    one_policy: bool = False,
) -> tuple[Config, list[str]]:
    """Return the settings of branches, and warnings about them. They are the settings in `RECORDED` of the parent's run,
    changed by `configure` and by the sampling parameters `sampling`; prompts are given elsewhere. With `one_policy` one model
    answers all agents, else the policies of the parent's run do. Raises `ConfigError` for values that are not valid."""
    check_sampling(sampling)
    base, unknown = recorded_config(parent.found.settings)
    lost = [
        f"the run's setting {name} is not of this release, and left out.{plugins().brought('settings', name)}"
        for name in unknown
    ]
    held: dict[str, float | int] = dict(base.gateway.override_sampling)
    if parent.rollout.split != TRAIN and base.trainer.eval_temperature is not None:
        held["temperature"] = base.trainer.eval_temperature
    seed = parent.found.how.seed
    recorded = base.model_dump(mode="json")
    configured = configure(
        with_settings(
            Config(),
            {name: _at(recorded, name) for name in RECORDED if find(name)}
            | ({} if one_policy else _policies(recorded, parent.run))
            | ({"trainer.project": parent.run.project} if find("trainer.project") else {})
            | {
                "trainer.eval_temperature": None,
                "trainer.seed": base.trainer.seed if seed is None else seed,
                "runner.seed_agents": seed is not None,
                "gateway.override_sampling": held,
            },
        )
    )
    config = with_one_policy(configured) if one_policy else configured
    if config.policy_server.attach:
        raise ConfigError(
            "policy_server.attach: branches have a vLLM of their own with the weights that are named; leave it out"
        )
    asked = {
        name: value for name, value in config.gateway.override_sampling.items() if ALIASES.get(name) not in sampling
    }
    check_sampling({name: value for name, value in asked.items() if name in SAMPLING})
    config = with_settings(config, {"gateway.override_sampling": {**asked, **sampling}})
    # Recorded settings that may matter to a branch, that no record may set, and that the user has not set.
    here, default = config.model_dump(mode="json"), config_model()().model_dump(mode="json")
    if left := [
        name for name in CALLER_ONLY if find(name) and _at(recorded, name) not in (_at(default, name), _at(here, name))
    ]:
        lost.append(
            f"the run was recorded with {', '.join(left)}, which no record sets on this machine: give what its agent needs "
            "with --set or --config"
        )
    return config, lost


def _policies(recorded: Mapping[str, Any], run: Run) -> dict[str, object]:
    """Return the settings of the policies of a run: their agents, and the adapters of the trained ones. Raises `ConfigError`
    if one vLLM cannot answer them together."""
    try:
        check_one_model(run)
    except ConfigError as error:
        raise ConfigError(
            f"{error}: name the weights of one policy for all agents (--weights RUN/model/NAME)"
        ) from error
    kept = ("agents", "models", "train")
    adapters = {name: {"lora": lora.model_dump(mode="json")} for name, lora in policies_of(run.config).items() if lora}
    own = {name: {key: policy[key] for key in kept} for name, policy in recorded.get("policies", {}).items()}
    return {"policies": {name: policy | adapters.get(name, {}) for name, policy in own.items()}} if adapters else {}


def _at(tree: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    return tree[section][key]


def remarks(parent: Parent, n: int, sampling: Mapping[str, float | int]) -> Iterator[str]:
    """Yield a warning if all branches will be alike because the call is sampled at temperature 0. `sampling` replaces the
    agent's own parameters."""
    request = parent.at.exchange.request
    asked = {**request, **sampling} if isinstance(request, dict) else {}
    if n > 1 and asked.get("temperature") == 0:
        yield f"call {parent.at.number} is sampled at temperature 0: the branches are mostly alike (--set temperature=1)"
