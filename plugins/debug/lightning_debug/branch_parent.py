"""The rollout that branches begin as: where it is, whether it can be branched at a call, and under which settings it ran.

The invariant: what cannot be branched is refused here, before anything is started; a setting that cannot be kept is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning.cli.runs import answers
from lightning.config import Config, with_settings
from lightning.config.fields import did_you_mean
from lightning.errors import ConfigError, DataError, LightningError
from lightning.gateway.replay.branches import Prefix, edited, prefix_of
from lightning.gateway.replay.recorded import RecordedCall
from lightning.gateway.sampling import ALIASES, NEUTRAL, TOKEN_LIMITS
from lightning.store.protocol import Store
from lightning.store.resource_ref import run_id_of, store_in
from lightning.store.url import parse, redacted
from lightning.trainer.plan import TRAIN
from lightning.types import Json, Rollout, Run
from pydantic import ValidationError

from lightning_debug.command import Found, found_in

SAMPLING: Final = ("temperature", *NEUTRAL, *TOKEN_LIMITS, "seed")
"""Sampling parameters of a call that may be given other values."""


@dataclass(frozen=True, slots=True)
class Parent:
    """A rollout that can be branched at the call `at`. `url` is its store's, `folder` that of its run, None where it is not
    here."""

    url: str
    folder: Path | None
    found: Found
    run: Run
    at: RecordedCall
    prefix: Prefix

    @property
    def rollout(self) -> Rollout:
        """The rollout, as the attempt ended that is branched."""
        return self.found.recorded.rollout

    @property
    def version(self) -> int:
        """The version of the policy that answered the call."""
        versions = self.at.transition.versions
        return versions[0].version if versions else self.rollout.step

    @property
    def live_tools(self) -> list[str]:
        """The tools of the rollout that run again in a branch: those that frameworks run, and all from the call on."""
        answered = {id(event) for event in self.prefix.tool_events if not event.call_id}
        return sorted({event.name for event in self.found.recorded.tool_events if id(event) not in answered})

    def first_call_of(self, component: str) -> RecordedCall | None:
        """The first call that a component made."""
        calls = self.found.recorded.calls
        return next((call for call in calls if component in call.caller.split("/")), None)


def find_parent(where: str, rollout: str, attempt: int | None, at: int) -> Parent:
    """A rollout of the stores at a place, to be branched at its call number `at`. Raises `ConfigError` where none has it,
    `DataError` where it cannot be branched there."""
    if where.startswith(("http://", "https://")):
        raise ConfigError(
            f"{redacted(where)} is a Lightning Server, which answers agents itself: branch where its database can be reached"
        )
    for url, found in answers(where, lambda _, store: _find(store, rollout, attempt)):
        if isinstance(found, LightningError):
            raise found
        if found is not None:
            return _parent(where, url, found, at)
    raise ConfigError(
        f"there is no rollout {rollout!r} in {where}: `lightning runs --runs {where} show RUN` lists those of a run"
    )


async def _find(store: Store, name: str, attempt: int | None) -> Found | LightningError | None:
    rollout = await store.get_rollout(name)
    if rollout is None:
        return None
    if rollout.parent is not None:
        return DataError(f"the rollout {name} is a branch of {rollout.parent[0]}: branch that one")
    if not rollout.status.ended and attempt in (None, rollout.attempt):
        return DataError(f"the rollout {name} is {rollout.status}: branch it when it has ended")
    try:
        return await found_in(store, name, attempt)
    except LightningError as error:  # not raised: other stores would be asked then
        return error


def _parent(where: str, url: str, found: Found, at: int) -> Parent:
    recorded, name = found.recorded, found.recorded.rollout.id
    count = len(recorded.calls)
    if not 1 <= at <= count:
        calls = f"{count} call{'s' if count > 1 else ''}"
        raise DataError(f"the rollout {name} has {calls}, counted from 1: there is no call {at} to branch at")
    call = recorded.calls[at - 1]
    if not call.transition.status.answered:
        raise DataError(
            f"call {at} of the rollout {name} was not answered ({call.transition.status}): branch at another"
        )
    prefix = prefix_of(recorded, call.transition.seq)
    if found.run is None:
        raise DataError(f"the store does not have the run {recorded.rollout.run} of the rollout {name}")
    return Parent(url, _folder_of(found.run.id, where, url), found, found.run, call, prefix)


def _folder_of(run: str, where: str, url: str) -> Path | None:
    """The folder of a run whose store this is, as far as it is at this place."""
    place = Path("runs" if "://" in where else where)
    candidates = [place, *sorted(place.iterdir())] if place.is_dir() else [place.parent]
    known = (each for each in candidates if store_in(each) and run_id_of(each) == run)
    return next((each.resolve() for each in known if _same(store_in(each), url)), None)


def _same(one: str, other: str) -> bool:
    """Whether two URLs are those of one store."""
    if parse(one).scheme == parse(other).scheme == "sqlite":
        return Path(parse(one).path).resolve() == Path(parse(other).path).resolve()
    return redacted(one) == redacted(other)


def check_edit(parent: Parent, text: str) -> None:
    """Raise `DataError` where the call's answer cannot be another text."""
    edited(parent.at, text)


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what is no sampling parameter, or no number."""
    for name, value in sampling.items():
        if name not in SAMPLING:
            raise ConfigError(
                f"--set {name}: no sampling parameter{did_you_mean(name, SAMPLING)} (they are {', '.join(SAMPLING)}); a "
                "setting is written section.field=value"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"--set {name}={value}: give a number")


def config_of(
    parent: Parent, sampling: Mapping[str, float | int], configure: Callable[[Config], Config]
) -> tuple[Config, list[str]]:
    """The settings of branches: those of the parent's run, as `configure` changes them, with these sampling parameters; and
    what is to be said of them. Prompts are not among them. Raises `ConfigError`."""
    check_sampling(sampling)
    base, lost = _recorded_config(parent.found.settings)
    held: dict[str, float | int] = dict(base.gateway.override_sampling)
    if parent.rollout.split != TRAIN and base.trainer.eval_temperature is not None:
        held["temperature"] = base.trainer.eval_temperature
    seed, default = parent.found.how.seed, Config()
    here = with_settings(
        base,
        {
            "trainer.eval_temperature": None,
            "trainer.max_staleness": 0,
            "trainer.seed": base.trainer.seed if seed is None else seed,
            "trainer.project": parent.run.project,
            "runner.seed_agents": seed is not None,
            "runner.prompts": {},
            "gateway.override_sampling": held,
            "policy_server.attach": "",
            "policy_server.weight_transfer": "auto",
            "gateway.host": default.gateway.host,
            "gateway.port": 0,
            "policy_server.host": default.policy_server.host,
            "policy_server.port": 0,
            "server.port": 0,
        },
    )
    config = configure(here)
    if config.policy_server.attach:
        raise ConfigError(
            "policy_server.attach: branches have a vLLM of their own with the weights that are named; leave it out"
        )
    asked = {
        name: value for name, value in config.gateway.override_sampling.items() if ALIASES.get(name) not in sampling
    }
    return with_settings(config, {"gateway.override_sampling": {**asked, **sampling}}), lost


def _recorded_config(said: Mapping[str, Json]) -> tuple[Config, list[str]]:
    """The settings of a run's record; what this release does not have is left out, and said."""
    tree: Any = _copied(said)
    try:
        return Config.model_validate(tree), []
    except ValidationError as error:
        places = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
    for place in places:
        holder = tree
        for name in place[:-1]:
            holder = holder[name]
        del holder[place[-1]]
    names = [".".join(map(str, place)) for place in places]
    try:
        return Config.model_validate(tree), [
            f"the run's setting {name} is not of this release, and left out" for name in names
        ]
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"the settings of the parent's run are not this release's: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error


def _copied(value: Any) -> Any:
    return {name: _copied(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def remarks(parent: Parent, n: int, sampling: Mapping[str, float | int]) -> Iterator[str]:
    """What makes branches alike, where that is so. `sampling` is what replaces the agent's own."""
    request = parent.at.exchange.request
    asked = {**request, **sampling} if isinstance(request, dict) else {}
    if n > 1 and asked.get("seed") is not None:
        yield f"call {parent.at.number} has a seed of its own ({asked['seed']}): the branches are sampled alike"
    if n > 1 and asked.get("temperature") == 0:
        yield f"call {parent.at.number} is sampled at temperature 0: the branches are mostly alike (--set temperature=1)"
