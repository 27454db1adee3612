"""Pages as tests read them: their blocks by title, and tables as texts."""

from __future__ import annotations

import json
from typing import Any

from lightning.store.protocol import Store
from lightning_console.places import Places
from lightning_console.router import Address, show


def places_of(store: Store, url: str = "memory://", project: str | None = None) -> Places:
    return Places(stores={url: store}, project=project)


def to(page: str, *about: str, **options: object) -> str:
    return str(Address(page, about, {name: str(value) for name, value in options.items()}))


async def shown(places: Places, address: str) -> dict[str, Any]:
    """The blocks of a page, by their titles."""
    page = await show(places, address)
    made = json.loads(json.dumps(page.to_json(), allow_nan=False))
    return {block["title"] or block["component"]: block["value"] for block in made["blocks"]} | {"page": page}


def texts(table: dict[str, Any]) -> list[dict[str, str]]:
    names = [column["name"] for column in table["columns"]]
    return [dict(zip(names, (cell["text"] for cell in row), strict=True)) for row in table["rows"]]
