"""Prompt templates of rollouts that are versions of resources; and the stage that finds a run's prompts.

The invariant: a run's prompts are chosen once, when it begins, and stored with it; an alias that moves later changes the next
run and never this one. A rollout names its versions before it is leased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from lightning.errors import ConfigError, StoreError
from lightning.plugins import plugins
from lightning.store.places import existing_store
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.agents import of_project
from lightning.trainer.model import models_in
from lightning.trainer.run_stages import API, PREFIX, PROBE, PROBES, Prompts, RunStage
from lightning.types import DEFAULT_PROJECT, POLICY, Json, Rollout, Run

from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import list_resources, put_resource
from lightning_resources.reference import find, parse_reference
from lightning_resources.weights import keep_weights

STATE: Final = "prompts"
"""Key of the state under which a run stores its choice: `{component: [resource, version]}`."""


@dataclass
class ResourcePrompts(Prompts):
    """A run's prompts, of which some are versions of resources."""

    _texts: dict[tuple[str, int], str] = field(default_factory=dict)

    def bind(self, component: str, resource: Resource, *, pinned: bool = True) -> None:
        """Make a resource the prompt of a component; `pinned` to this version, or else to the version that each rollout
        names."""
        self.bound[component] = resource.name
        if pinned:
            self.versions[resource.name] = resource.version
        self._texts[resource.name, resource.version] = _text(resource)

    async def stamp(self, store: Store, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with the versions that they run with, and load the texts of these versions."""
        stamped = [replace(rollout, resources={**self.versions, **rollout.resources}) for rollout in rollouts]
        wanted = {item for rollout in stamped for item in rollout.resources.items() if item[0] in self.bound.values()}
        for name, version in sorted(wanted - self._texts.keys()):
            self._texts[name, version] = _text(await find(store, parse_reference(f"{name}@{version}")))
        return stamped

    async def load(self, store: Store) -> None:
        """Load the texts of all versions, because rollouts from before a restart may still be waiting."""
        for name in set(self.bound.values()):
            self._texts |= {(name, item.version): _text(item) for item in await list_resources(store, name)}

    def of(self, rollout: Rollout) -> dict[str, str]:
        """Return the templates of a rollout, by component."""
        chosen = {**self.versions, **rollout.resources}
        return dict(self.own) | {
            component: self._texts[name, chosen[name]] for component, name in self.bound.items() if name in chosen
        }

    async def keep(self, store: Store, run: str) -> None:
        """Store the choice of versions with the run."""
        chosen: dict[str, Json] = {
            component: [name, self.versions[name]] for component, name in self.bound.items() if name in self.versions
        }
        if chosen:
            await store.put_state(run, STATE, chosen)


async def resolve_prompts(
    store: Store, run: str, settings: Mapping[str, str], *, home: str = "", project: str = DEFAULT_PROJECT
) -> ResourcePrompts:
    """Find the prompts of a run by its settings `runner.prompts`. A resumed run gets the versions that it has stored; otherwise
    references are looked up now.

    `store` is the view of the run's project, as is every other store that a reference names (a server shows the token's
    project); a resource of another store is copied into this one. `home` is the URL of the store for references without a
    place, where it is not this store. Raises `StoreError` or `ConfigError` for a reference that leads nowhere.
    """
    prompts = ResourcePrompts({name: text for name, text in settings.items() if not text.startswith(PREFIX)})
    kept = await store.get_state(run, STATE)
    for component, text in settings.items():
        if not text.startswith(PREFIX):
            continue
        chosen = kept.get(component) if isinstance(kept, Mapping) else None
        if isinstance(chosen, Sequence) and not isinstance(chosen, str):
            resource = await find(store, parse_reference(f"{chosen[0]}@{chosen[1]}"))
        else:
            resource = await _found(store, text, home, project)
        if resource.kind is not ResourceKind.PROMPT:
            raise ConfigError(
                f"runner.prompts.{component}: {resource.name}@{resource.version} is a {resource.kind.value}, not a prompt"
            )
        other = prompts.versions.get(resource.name, resource.version)
        if other != resource.version:
            raise ConfigError(
                f"runner.prompts asks for versions {other} and {resource.version} of {resource.name!r} at once: a rollout "
                "runs with one version of a resource"
            )
        prompts.bind(component, resource)
    await prompts.load(store)
    return prompts


async def _found(store: Store, text: str, home: str, project: str) -> Resource:
    reference = parse_reference(text)
    place = reference.place or home
    if not place:
        return await find(store, reference)
    async with plugins().opened_store(existing_store(place), make=False) as other:
        resource = await find(of_project(other, project), replace(reference, place=""))
    origin: dict[str, Json] = {"store": redacted(place), "version": resource.version}
    return await put_resource(store, replace(resource, metadata={**resource.metadata, "origin": origin}))


def _text(resource: Resource) -> str:
    if not isinstance(resource.content, str):
        raise StoreError(f"version {resource.version} of {resource.name!r} is a {resource.kind.value}, not a prompt")
    return resource.content


def bindable(prompts: Prompts) -> ResourcePrompts:
    """Return a run's prompts in the form to which versions of resources can be bound."""
    return prompts if isinstance(prompts, ResourcePrompts) else ResourcePrompts(prompts.own)


class ResourcesOfRun(RunStage):
    """The stage that finds a run's prompts, and makes its trained weights a version."""

    api = API

    async def prompts(self, store: Store, run: Run, given: Mapping[str, str], home: str) -> Prompts:
        """Find the prompts of a run by its settings `runner.prompts`."""
        return await resolve_prompts(store, run.id, given, home=home, project=run.project)

    async def exported(self, store: Store, run: Run, folder: Path, about: Mapping[str, Json]) -> None:
        """Make the run's model in `folder` the next version of `policy/weights`, or the model of each of its policies the next
        version of `policy/NAME/weights`."""
        probes = about.get(PROBES)
        common = {key: value for key, value in about.items() if key != PROBES}
        for policy, model in (models_in(folder) or {POLICY: folder}).items():
            probe = probes.get(policy) if isinstance(probes, Mapping) else None
            await keep_weights(store, model, common | ({PROBE: probe} if probe else {}), policy)
