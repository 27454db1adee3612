"""What the shipped databases are about: six tables in three databases, and the words in which people ask for them.

The invariant: each phrase means one condition, so that a question has one right query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Words:
    """A text column: its values, and how a question asks for one of them."""

    values: tuple[str, ...]
    phrase: str


@dataclass(frozen=True, slots=True)
class Numbers:
    """A column of whole numbers: its range, what people call it, and how they compare it."""

    low: int
    high: int
    noun: str
    more: str
    less: str


@dataclass(frozen=True, slots=True)
class Table:
    """One table. `key` is its naming column, `plural` what its rows are called."""

    name: str
    key: str
    plural: str
    words: Mapping[str, Words]
    numbers: Mapping[str, Numbers]

    @property
    def columns(self) -> list[str]:
        """Names in the order of the table."""
        return [self.key, *self.words, *self.numbers]


GENERIC = ("with {noun} over {{}}", "with {noun} under {{}}")
"""Every number can be compared like this too."""

DOMAIN = {
    "company": (
        Table(
            "staff",
            "name",
            "workers",
            {
                "team": Words(("red", "blue", "green", "gold"), "on the {} team"),
                "city": Words(("Oslo", "Rome", "Lima", "Cairo"), "from {}"),
            },
            {
                "age": Numbers(18, 70, "age", "older than {}", "younger than {}"),
                "pay": Numbers(10, 99, "salary", "earning over {}", "earning under {}"),
            },
        ),
        Table(
            "rooms",
            "room",
            "offices",
            {
                "wing": Words(("north", "south", "east", "west"), "in the {} wing"),
                "usage": Words(("desk", "lab", "store", "hall"), "used as {}"),
            },
            {
                "seats": Numbers(2, 60, "capacity", "seating over {}", "seating under {}"),
                "area": Numbers(10, 99, "surface", "larger than {}", "smaller than {}"),
            },
        ),
    ),
    "shop": (
        Table(
            "items",
            "item",
            "products",
            {
                "kind": Words(("tool", "toy", "book", "food"), "of type {}"),
                "color": Words(("white", "black", "pink", "grey"), "painted {}"),
            },
            {
                "price": Numbers(5, 99, "cost", "dearer than {}", "cheaper than {}"),
                "stock": Numbers(1, 80, "supply", "stocked over {}", "stocked under {}"),
            },
        ),
        Table(
            "clients",
            "client",
            "buyers",
            {
                "level": Words(("basic", "silver", "prime", "elite"), "of rank {}"),
                "street": Words(("Elm", "Oak", "Pine", "Ash"), "living at {}"),
            },
            {
                "orders": Numbers(1, 90, "activity", "ordering over {}", "ordering under {}"),
                "spent": Numbers(10, 99, "turnover", "spending over {}", "spending under {}"),
            },
        ),
    ),
    "music": (
        Table(
            "songs",
            "title",
            "tracks",
            {
                "genre": Words(("rock", "jazz", "folk", "metal"), "in {} style"),
                "singer": Words(("Abel", "Bella", "Carlo", "Dina"), "sung by {}"),
            },
            {
                "rating": Numbers(10, 99, "score", "rated over {}", "rated under {}"),
                "plays": Numbers(10, 99, "popularity", "played over {}", "played under {}"),
            },
        ),
        Table(
            "venues",
            "venue",
            "stages",
            {
                "region": Words(("coast", "hills", "plain", "delta"), "near the {}"),
                "owner": Words(("Vera", "Walt", "Yara", "Zeno"), "owned by {}"),
            },
            {
                "size": Numbers(10, 99, "crowd", "holding over {}", "holding under {}"),
                "fee": Numbers(5, 80, "rent", "charging over {}", "charging under {}"),
            },
        ),
    ),
}
"""The tables of each database."""

TABLES = {table.name: table for tables in DOMAIN.values() for table in tables}
"""All of them by name; no two share one."""

AGGREGATES = {
    "AVG": ("average", "mean"),
    "SUM": ("total", "combined"),
    "MAX": ("highest", "top"),
    "MIN": ("lowest", "smallest"),
}
