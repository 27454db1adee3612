"""A small made-up world: who works where, who lives where, and what is to know about companies and cities.

`python -m lightning_examples.rag_openai_agents.world OUT` writes the documents of world 0, which ship as `corpus.jsonl`.
The invariant: a world follows from its seed; every seed uses the same names and combines them anew, so nothing that holds in
one world helps in another.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_examples.rag_openai_agents.retriever import Document, save_corpus

_NAMES = """
Mira Ilya Sela Oren Tova Rafe Nils Juno Cleo Bram Dara Enzo Faye Gwen Hugo Iris Joss Kira Lars Nora
Voss Kern Holt Lund Pike Rowe Wells Yates Birch Crane Drake Frost Marsh Quill Stone Thorn Vance Abbot Zell Ames
Norvik Solace Tarn Umber Vela Xenon Arden Bolt Cobalt Delta Ember Fable Glint Harbor Indigo Jasper
Porto Bergen Lyon Graz Turin Ghent Malmo Split Cadiz Derry Essen Faro Imola Jena Kotor Narva
Alder Brook Cedar Dove Eider Fern Gull Heron Ivy Jade
Arland Borland Corland Dorland Erland Forland
lamps boats cheese bikes clocks drones shoes paper
"""
FIRST, LAST, COMPANIES, CITIES, RIVERS, COUNTRIES, PRODUCTS = map(str.split, _NAMES.strip().splitlines())
PEOPLE = 280
"""People with a document of their own; the other names are those of founders and mayors."""

Facts = Mapping[str, Mapping[str, str]]
"""Of each thing: relation to value."""


@dataclass(frozen=True, slots=True)
class World:
    """`people` have `company` and `city`; `companies` `product`, `base`, `founder`; `cities` `river`, `country`, `mayor`."""

    people: Facts
    companies: Facts
    cities: Facts

    def documents(self) -> Iterator[Document]:
        """What is written about everyone and everything, one short document each."""
        for name, facts in self.people.items():
            yield Document(name, f"{name} works at {facts['company']} and lives in {facts['city']}.")
        for name, facts in self.companies.items():
            made, base, founder = facts["product"], facts["base"], facts["founder"]
            yield Document(name, f"{name} makes {made}, is based in {base} and was founded by {founder}.")
        for name, facts in self.cities.items():
            river, country, mayor = facts["river"], facts["country"], facts["mayor"]
            yield Document(name, f"{name} lies on the {river}, belongs to {country} and is led by {mayor}.")


def make_world(seed: int) -> World:
    """The world of a seed."""
    rng = random.Random(f"world {seed}")  # noqa: S311 — reproducible, not secret
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    rng.shuffle(names)
    people, officials = names[:PEOPLE], iter(names[PEOPLE:])
    return World(
        people={name: {"company": rng.choice(COMPANIES), "city": rng.choice(CITIES)} for name in people},
        companies={
            name: {"product": rng.choice(PRODUCTS), "base": rng.choice(CITIES), "founder": next(officials)}
            for name in COMPANIES
        },
        cities={
            name: {"river": rng.choice(RIVERS), "country": rng.choice(COUNTRIES), "mayor": next(officials)}
            for name in CITIES
        },
    )


def main() -> None:
    """Read the command line and write the corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    save_corpus(make_world(0).documents(), options.out)


if __name__ == "__main__":
    main()
