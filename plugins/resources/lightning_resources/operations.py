"""The store operations on resources, such as `await put_resource(store, resource)`. Every store has them.

The invariant: a version is written once and read back unchanged. An alias points to a version that exists, and each of its
moves is stored. A project sees its own resources, by its own names, and moves no other project's alias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, Protocol

from lightning.errors import StoreError
from lightning.installation import OWN
from lightning.store.operation import ANY, LOOK, TRAIN, Operation, OperationGroup, UnseenError, operation
from lightning.store.protocol import Store

from lightning_resources.names import ProjectNames
from lightning_resources.nouns import LATEST, Alias, Resource, ResourceUse, no_version


class ResourceOperations(Protocol):
    """The signatures of the operations on resources."""

    async def put_resource(self, resource: Resource) -> Resource:
        """Store a resource as the next version of its name, and return the version.

        Content that a version of this name already has adds no version: that version is returned, with its metadata. Raises
        `ConflictError` when the name belongs to another kind of resource.
        """

    async def get_resource(self, name: str, which: int | str = LATEST) -> Resource | None:
        """Return a version of a resource by its number or by an alias; None when there is none."""

    async def list_resources(self, name: str | None = None) -> list[Resource]:
        """Return all versions of a resource, or of all resources, by name and version."""

    async def set_alias(self, name: str, alias: str, version: int, *, once: str = "") -> Alias:
        """Point an alias to a version, atomically. Nothing changes when it points there already.

        Raises `DataError` for `latest` and for an invalid name, `StoreError` when there is no such version.
        """

    async def roll_back_alias(self, name: str, alias: str, *, once: str = "") -> Alias:
        """Point an alias back to its previous version. Repeated, it goes back one further version each time.

        Raises `StoreError` when there is no earlier version.
        """

    async def list_aliases(self, name: str | None = None) -> list[Alias]:
        """Return where the aliases of a resource, or of all resources, point now, by name and alias. `latest` is among them."""

    async def alias_history(self, name: str, alias: str) -> list[Alias]:
        """Return every move of an alias, oldest first, including rollbacks."""

    async def resource_uses(self, name: str) -> list[ResourceUse]:
        """Return the results of rollouts under each version of a resource, by version, run and split."""


async def _of_project(store: Store, project: str, asked: Operation, arguments: dict[str, Any]) -> Any:
    """Do an operation for one project: names are changed to the stored ones and back, and other projects' resources and runs
    are left out. Raises `UnseenError` or `StoreError` for a name or alias that the project does not have."""
    names, inward = ProjectNames(project), dict(arguments)
    name = arguments.get("name")
    if name is not None:
        if not names.may_have(name):
            raise UnseenError(f"the resource {name!r} is unknown: list_resources() says which there are")
        inward["name"] = names.stored(name)
    if "resource" in arguments:
        resource: Resource = arguments["resource"]
        inward["resource"] = replace(resource, name=names.stored(resource.name))
    if asked.name == "set_alias":
        version = arguments["version"]
        if await get_resource(store, inward["name"], version) is None:
            raise no_version(version, name, await list_resources(store, inward["name"]))
    if asked.name == "roll_back_alias" and not await alias_history(store, inward["name"], arguments["alias"]):
        raise StoreError(
            f"the resource {name!r} has no alias {arguments['alias']!r}: list_aliases() says which there are"
        )
    answer = await asked(store, **inward)
    if not isinstance(answer, list):
        return _seen(names, answer)
    return [_seen(names, each) for each in answer if await _owns(store, project, names, each)]


async def _owns(store: Store, project: str, names: ProjectNames, each: Resource | Alias | ResourceUse) -> bool:
    if isinstance(each, ResourceUse):
        run = await store.get_run(each.run)
        return run is not None and run.project == project
    return names.owns(each.name)


def _seen(names: ProjectNames, answer: Any) -> Any:
    return replace(answer, name=names.seen(answer.name)) if isinstance(answer, Resource | Alias) else answer


OF_RESOURCE: Final = {"name": "Of this resource only."}
ALIAS: Final = "/resources/{name}/aliases/{alias}"

list_resources = operation(
    ResourceOperations.list_resources,
    "GET /resources",
    ANY,
    cursor=("name", "version"),
    empty=True,
    doc="Versions of resources, by name and version.",
    query=OF_RESOURCE,
    owned=_of_project,
)
put_resource = operation(
    ResourceOperations.put_resource,
    "POST /resources",
    TRAIN,
    body="resource",
    doc="Keep a resource as the next version of its name; content that the name has already stays the version it is. 409 "
    "when the name belongs to another kind of resource.",
    owned=_of_project,
)
get_resource = operation(
    ResourceOperations.get_resource,
    "GET /resources/{name}/versions/{which}",
    ANY,
    empty=True,
    missing="GET /resources lists those there are",
    doc="A version of a resource, by its number or by an alias.",
    owned=_of_project,
)
resource_uses = operation(
    ResourceOperations.resource_uses,
    "GET /resources/{name}/uses",
    LOOK,
    cursor=("version", "run", "split"),
    empty=True,
    owned=_of_project,
)
list_aliases = operation(
    ResourceOperations.list_aliases,
    "GET /aliases",
    ANY,
    cursor=("name", "alias"),
    empty=True,
    doc="Where aliases point now, by name and alias; `latest` is among them.",
    query=OF_RESOURCE,
    owned=_of_project,
)
set_alias = operation(
    ResourceOperations.set_alias, f"PUT {ALIAS}", TRAIN, doc="Point an alias to a version.", owned=_of_project
)
roll_back_alias = operation(ResourceOperations.roll_back_alias, f"POST {ALIAS}/rollback", TRAIN, owned=_of_project)
alias_history = operation(ResourceOperations.alias_history, f"GET {ALIAS}/history", LOOK, empty=True, owned=_of_project)
RESOURCES: Final = OperationGroup(
    "resources",
    (
        list_resources,
        put_resource,
        get_resource,
        resource_uses,
        list_aliases,
        set_alias,
        roll_back_alias,
        alias_history,
    ),
    parts={"sql": "lightning_resources.sql:PART", "redis": "lightning_resources.redis:FUNCTIONS"},
    distribution=OWN,
)
