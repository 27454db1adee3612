"""The files of versions of weights, over HTTP: `GET /weights/NAME@WHICH` says what there is, `.../FILE` gives one.

The invariant: what is sent has the SHA-256 that the version was made with, so that no file of the machine that was put in a
version's place, or named by somebody as one, ever leaves it; and a token sees the weights of its project alone.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from lightning.errors import ConfigError, LightningError
from lightning.server.api.answers import answer, refusal_of, refuse
from lightning.server.auth import Authenticator
from lightning.server.errors import ApiError
from lightning.server.projects import Projects
from lightning.store import json_codec
from lightning.store.protocol import Store
from lightning.store.resource_ref import parse_reference
from lightning.types import Resource, ResourceKind
from lightning.types import Scope as TokenScope

MOUNT: Final = "weights"
REMEMBERED = 1024
"""Files whose digests are known, as long as they are not changed."""
Stamp = tuple[str, int, int, int]
"""What tells one state of a file from another: its path, inode, size, and time of change in nanoseconds."""


class WeightFiles:
    """The application; mount it at `MOUNT`. With `only` it gives the files of that resource alone."""

    def __init__(self, store: Store, authenticator: Authenticator, only: str = "") -> None:
        self._projects, self._authenticator, self._only = Projects(store), authenticator, only
        self._digests: OrderedDict[Stamp, str] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        try:
            raw: bytes = scope.get("raw_path") or scope["path"].encode()
            parts = [unquote(part.decode("latin-1")) for part in raw.partition(b"?")[0].split(b"/")[2:]]
            if scope["method"] != "GET" or not 1 <= len(parts) <= 2 or not all(parts):
                raise ApiError(
                    404, "unknown_route", f"There are GET /{MOUNT}/NAME@WHICH and GET /{MOUNT}/NAME@WHICH/FILE."
                )
            resource = await self._resource(scope, parts[0])
            if len(parts) == 1:
                await answer(send, 200, json_codec.write(json_codec.codec_of(Resource).encode(resource)))
                return
            file = await asyncio.to_thread(self._file, resource, parts[1])
        except (ApiError, LightningError, OSError) as error:
            await refuse(send, refusal_of(error, f"GET /{MOUNT}"))
            return
        await FileResponse(file, media_type="application/octet-stream")(scope, receive, send)

    async def _resource(self, scope: Scope, named: str) -> Resource:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        principal = await self._authenticator.principal(given[0].decode("latin-1") if len(given) == 1 else "")
        principal.require(TokenScope.VIEWER, TokenScope.TRAINER)
        reference = parse_reference(named)
        found = None
        if not reference.place and self._only in ("", reference.name):
            found = await self._projects.of(principal.project).get_resource(reference.name, reference.which)
        if found is None or found.kind is not ResourceKind.WEIGHTS:
            raise ApiError(
                404, "not_found", f"There are no weights {named[:200]!r}: `lightning resources ls` lists all."
            )
        return found

    def _file(self, resource: Resource, name: str) -> Path:
        """A file of a version. Raises `ApiError` (404) for one that the version has not, `ConfigError` for another content."""
        content = resource.content if isinstance(resource.content, Mapping) else {}
        files = content.get("files")
        digest = files.get(name) if isinstance(files, Mapping) and "/" not in name else None
        if digest is None:
            raise ApiError(404, "not_found", f"{resource.name}@{resource.version} has no file {name[:200]!r}.")
        file = Path(str(content.get("path"))) / name
        if not file.is_file() or self._digest(file) != digest:
            raise ConfigError(
                f"the file {name} of {resource.name}@{resource.version} is gone or was changed on the server"
            )
        return file

    def _digest(self, file: Path) -> str:
        stat = file.stat()
        stamp = (str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if stamp not in self._digests:
            with file.open("rb") as stream:
                self._digests[stamp] = hashlib.file_digest(stream, "sha256").hexdigest()
            if len(self._digests) > REMEMBERED:
                self._digests.popitem(last=False)
        return self._digests[stamp]
