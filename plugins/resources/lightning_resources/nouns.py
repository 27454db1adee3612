"""The nouns of resources: a version, an alias that points to one, and the rewards of rollouts with one.

The invariant: a version never changes, and its digest depends on its content alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from lightning.errors import DataError, StoreError
from lightning.store.rows import Row, as_mapping
from lightning.types import Json, not_json

LATEST: Final = "latest"
"""The alias that every resource has: it always points to the newest version."""


class ResourceKind(StrEnum):
    """What a resource is: the template of a component's prompt, a model's weights, or settings of the agent's own."""

    PROMPT = "prompt"
    WEIGHTS = "weights"
    CONFIG = "config"


@dataclass(frozen=True, slots=True)
class Resource:
    """One version of a named artifact that an optimizer may change. A version never changes: other content is another version.

    `content` is the text of a `prompt`, any JSON for a `config`, and for `weights` the folder of its files with the SHA-256 of
    each: `{"path": folder, "files": {name: hexadecimal}}`. `metadata` says how the version was made (`parent`: the version it
    was made from, `reward`, ...). The store sets `version` (1, 2, ... for each name) and `created_at` (Unix seconds by the
    database's clock); both are 0 before. Raises `DataError` for a name or content that cannot be stored.
    """

    name: str
    content: Json
    kind: ResourceKind = ResourceKind.PROMPT
    metadata: Mapping[str, Json] = field(default_factory=dict)
    version: int = 0
    created_at: float = 0.0

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip() or any(not c.isprintable() or c in "@#" for c in self.name):
            raise DataError(
                f"{self.name!r} cannot name a resource: use a word without @ and #, such as the name of the component"
            )
        if self.kind is ResourceKind.PROMPT and not isinstance(self.content, str):
            raise DataError(f"the prompt {self.name!r} is a {type(self.content).__qualname__}: a prompt is a text")
        for what, value in (("content", self.content), ("metadata", dict(self.metadata))):
            if found := not_json(value):
                raise DataError(f"the {what} of the resource {self.name!r} is not JSON: {found[0][:60]} {found[1]}")

    @property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of the content: of the text itself, or of its JSON with sorted keys and no spaces."""
        if isinstance(self.content, str):
            return hashlib.sha256(self.content.encode("utf-8", "surrogatepass")).hexdigest()
        text = json.dumps(self.content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Alias:
    """The version that an alias of a resource points to since `at` (Unix seconds by the database's clock)."""

    name: str
    alias: str
    version: int
    at: float


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """The results of a run's rollouts of one split with one version of a resource. `reward` is the mean over the `scored` ones,
    None without any. `failed` rollouts ended without a reward."""

    run: str
    split: str
    version: int
    rollouts: int
    scored: int
    failed: int
    reward: float | None


def check_alias(alias: str) -> None:
    """Raise `DataError` for an invalid name of an alias, such as `latest`."""
    if alias == LATEST:
        raise DataError("the alias latest is always the newest version and cannot be set: choose another name")
    if not alias or alias.isdecimal() or any(not c.isprintable() or c.isspace() or c in "@#" for c in alias):
        raise DataError(f"{alias!r} cannot name an alias: use a word such as production, no number and without @ and #")


def no_version(version: int, name: object, there: Iterable[Resource]) -> StoreError:
    """Return the error for a version that a resource does not have; `there` are those it has."""
    known = ", ".join(str(resource.version) for resource in there) or "none"
    return StoreError(f"there is no version {version} of the resource {name!r}; there are: {known}")


def uses_of_versions(name: str, counted: Iterable[Row]) -> list[ResourceUse]:
    """Return the results under each version of a resource, sorted by version, run and split.

    `counted` has a row for each set of versions that rollouts ran with: run, split, the versions by resource as JSON, the
    numbers of all, of scored and of failed rollouts, and the sum of their rewards or None.
    """
    totals: dict[tuple[int, str, str], tuple[int, int, int, float]] = {}
    for run, split, text, rollouts, scored, failed, reward in counted:
        version = as_mapping(text, f"the resources of a rollout of run {run!r}").get(name)
        if version is not None:
            before = totals.get((version, run, split), (0, 0, 0, 0.0))
            totals[version, run, split] = (
                before[0] + rollouts,
                before[1] + scored,
                before[2] + failed,
                before[3] + (reward or 0.0),
            )
    return [
        ResourceUse(run, split, version, rollouts, scored, failed, reward / scored if scored else None)
        for (version, run, split), (rollouts, scored, failed, reward) in sorted(totals.items())
    ]
