"""Which prompt templates a rollout runs with, where they are versions of resources; and a run's stage, which finds them.

The invariant: what a run's prompts are is decided once, when it begins, and kept with it; an alias that moves later changes
the next run and never this one. A rollout names the versions it runs with before it is leased.
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
from lightning.trainer.run_server import of_project
from lightning.trainer.run_stages import API, PREFIX, Prompts, RunStage
from lightning.types import DEFAULT_PROJECT, Json, Rollout, Run

from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import list_resources, put_resource
from lightning_resources.reference import find, parse_reference
from lightning_resources.weights import keep_weights

STATE: Final = "prompts"
"""Under which a run keeps its choice: `{component: [resource, version]}`."""


@dataclass
class ResourcePrompts(Prompts):
    """Prompts of which some are versions of resources."""

    _texts: dict[tuple[str, int], str] = field(default_factory=dict)

    def bind(self, component: str, resource: Resource, *, pinned: bool = True) -> None:
        """Give a component its prompt by a resource, `pinned` to this version."""
        self.bound[component] = resource.name
        if pinned:
            self.versions[resource.name] = resource.version
        self._texts[resource.name, resource.version] = _text(resource)

    async def stamp(self, store: Store, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with the versions they run with; their texts are at hand from now on."""
        stamped = [replace(rollout, resources={**self.versions, **rollout.resources}) for rollout in rollouts]
        wanted = {item for rollout in stamped for item in rollout.resources.items() if item[0] in self.bound.values()}
        for name, version in sorted(wanted - self._texts.keys()):
            self._texts[name, version] = _text(await find(store, parse_reference(f"{name}@{version}")))
        return stamped

    async def load(self, store: Store) -> None:
        """Have the texts of all versions at hand: rollouts of this run may be waiting from before a restart."""
        for name in set(self.bound.values()):
            self._texts |= {(name, item.version): _text(item) for item in await list_resources(store, name)}

    def of(self, rollout: Rollout) -> dict[str, str]:
        """The templates of a rollout, by component."""
        chosen = {**self.versions, **rollout.resources}
        return dict(self.own) | {
            component: self._texts[name, chosen[name]] for component, name in self.bound.items() if name in chosen
        }

    async def keep(self, store: Store, run: str) -> None:
        """Remember the choice with the run."""
        chosen: dict[str, Json] = {
            component: [name, self.versions[name]] for component, name in self.bound.items() if name in self.versions
        }
        if chosen:
            await store.put_state(run, STATE, chosen)


async def resolve_prompts(
    store: Store, run: str, settings: Mapping[str, str], *, home: str = "", project: str = DEFAULT_PROJECT
) -> ResourcePrompts:
    """The prompts of a run by its settings `runner.prompts`: those it kept when it goes on, else what references mean now.

    `store` is as the run's project sees it, and so is every other that a reference names (a server as the token's project sees
    it): a resource of that is copied into this one. `home` is the URL of the store that references without a place mean, where
    it is another than this. Raises `StoreError` or `ConfigError` for a reference that leads nowhere.
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
    """A run's prompts, to which versions of resources can be bound."""
    return prompts if isinstance(prompts, ResourcePrompts) else ResourcePrompts(prompts.own)


class ResourcesOfRun(RunStage):
    """Gives a run its prompts, and makes the weights that it leaves a version."""

    api = API

    async def prompts(self, store: Store, run: Run, given: Mapping[str, str], home: str) -> Prompts:
        """See `RunStage.prompts`."""
        return await resolve_prompts(store, run.id, given, home=home, project=run.project)

    async def exported(self, store: Store, run: Run, folder: Path, about: Mapping[str, Json]) -> None:
        """See `RunStage.exported`."""
        await keep_weights(store, folder, about)
