"""Versions of prompts, weights and settings, which aliases point to: operations on every store, `lightning resources`, prompts
that a run is given by `resource:NAME@ALIAS`, and the weights that it leaves."""

from lightning_resources.nouns import LATEST, Alias, Resource, ResourceKind, ResourceUse
from lightning_resources.operations import (
    alias_history,
    get_resource,
    list_aliases,
    list_resources,
    put_resource,
    resource_uses,
    roll_back_alias,
    set_alias,
)

__all__ = [
    "LATEST",
    "Alias",
    "Resource",
    "ResourceKind",
    "ResourceUse",
    "alias_history",
    "get_resource",
    "list_aliases",
    "list_resources",
    "put_resource",
    "resource_uses",
    "roll_back_alias",
    "set_alias",
]
