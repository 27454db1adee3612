"""What a console's pages ask of it: to show an address, and to do an action.

The invariant: a visitor sees the runs of their token's project and no others; an answer is bounded in time; and what fails is
said on the page, while the console goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any, Final

import orjson
from lightning.errors import LightningError
from lightning.store.protocol import Store

from lightning_console import router
from lightning_console.address import Address
from lightning_console.blocks import Page, json_of, with_whole_characters
from lightning_console.pages.branches import FORK
from lightning_console.places import Places
from lightning_console.web import actions
from lightning_console.web.chat import Chat
from lightning_console.web.forks import Forks
from lightning_console.web.gate import Asked
from lightning_console.web.visitors import Visitor, need_changes, visitor

logger = logging.getLogger(__name__)
SECONDS: Final = 60.0
"""Until a page is given up."""
CANNOT: Final = "the page %r could not be made"
TALKS: Final = ("say", "begin_again")


class Desk:
    """Answers the pages of all visitors. `places_of` gives what a visitor sees; `start` is the address of the first page; no
    branches are made here without `forks`."""

    def __init__(
        self,
        places_of: Callable[[Visitor], Places],
        chat: Chat,
        *,
        forks: Forks | None = None,
        start: str = "runs",
        where: str = "",
        has_login: bool = False,
    ) -> None:
        self._places_of, self._chat, self._forks = places_of, chat, forks
        self._start, self._where, self._has_login = start, where, has_login

    @property
    def functions(self) -> dict[str, Asked]:
        """What pages may ask; see `gate.FUNCTIONS`."""
        return {"show": self.show, "act": self.act}

    async def show(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The page of `asked["address"]`, or that it is still the one whose digest is `asked["seen"]`."""
        who = visitor()
        address = with_whole_characters(str(asked.get("address") or self._start))
        page = await self._page(who, address)
        try:  # in a thread: a rollout's page has megabytes, and what else the server answers does not wait for them
            written, digest = await asyncio.to_thread(_written, page)
        except Exception as error:  # a number that JSON does not have
            logger.exception(CANNOT, address[:200])
            page = router.cannot_show(address, router.fault_of(error))
            written, digest = _written(page)
        if digest == asked.get("seen"):
            return {"same": True, "live": page.live}
        where = f"{self._where} · {who.name}" if who.name else self._where
        said = {"digest": digest, "live": page.live, "where": where, "leave": self._has_login}
        return {"page": written, **said}

    async def act(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do the action `asked["name"]`; returns what was `said` of it, or the `error`."""
        who, name = visitor(), str(asked.get("name"))
        given = asked.get("arguments")
        given = given if isinstance(given, dict) else {}
        try:
            places = self._places_of(who)
            if name in TALKS:
                return {"said": await self._chat.act(await self._store(places), who, name, given)}
            async with asyncio.timeout(SECONDS):
                if name == FORK and self._forks is not None:
                    need_changes(who)
                    return {"said": await self._forks.begin(places, given)}
                return {"said": await actions.act(places, who, name, given)}
        except TimeoutError:
            return {"error": f"this took more than {SECONDS:g} s; look whether it was done before you try again"}
        except LightningError as error:
            return {"error": str(error)}
        except Exception as error:
            logger.exception("the action %r could not be done", name[:200])
            return {"error": router.fault_of(error)}

    async def _page(self, who: Visitor, text: str) -> Page:
        try:
            places = self._places_of(who)
            async with asyncio.timeout(SECONDS):
                if text.partition("?")[0] == "chat":
                    return await self._chat.page(await self._store(places), who, Address.parse(text))
                page = await router.show(places, text)
                return await actions.with_actions(places, who, page, forks=self._forks is not None)
        except TimeoutError:
            return router.cannot_show(
                text, f"this page took more than {SECONDS:g} s: it asks for too much, or its store is slow"
            )
        except LightningError as error:
            return router.cannot_show(text, str(error))
        except Exception as error:
            logger.exception(CANNOT, text[:200])
            return router.cannot_show(text, router.fault_of(error))

    async def _store(self, places: Places) -> Store | None:
        stores = await places.stores()
        return next(iter(stores.values()), None)


def _written(page: Page) -> tuple[Any, str]:
    """A page as JSON has it, and its digest."""
    written = json_of(page.to_json())
    return orjson.loads(written), hashlib.sha256(written).hexdigest()
