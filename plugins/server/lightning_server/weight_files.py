"""The files of weights over HTTP: `GET /weights/NAME@WHICH` describes a version, `GET /weights/NAME@WHICH/FILE` sends one file.

The invariant: a file that is sent has the SHA-256 that was recorded with its version, and lies below the server's own folder. A
file is opened once, without following links, and the same descriptor is hashed and sent. So no other file of the machine can
leave it, even if it is put in a version's place or named in a version. A token sees the weights of its project alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from lightning.asyncio_utils import unless
from lightning.bounded import Bounded
from lightning.errors import ConfigError, LightningError
from lightning.store.protocol import Store
from lightning.types import Scope as TokenScope
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import get_resource
from lightning_resources.reference import parse_reference
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lightning_server import json_codec
from lightning_server.auth import Authenticator, authorization_in
from lightning_server.errors import ApiError, answer, refusal_of, refuse
from lightning_server.projects import Projects

MOUNT: Final = "weights"
REMEMBERED = 1024
"""The digests of at most this many files are cached. A changed file has another `Stamp`, so its digest is computed again."""
Stamp = tuple[int, int, int, int, int]
"""Identifies one state of a file: device, inode, size, times of change of content and of inode (ns)."""
READERS = 2
"""Threads that only read files of weights, so that large files delay nothing else."""
PIECE = 4 << 20
"""Bytes that a thread reads at once. Requests for several files take turns after each piece, and closing waits for one piece at
most."""


class WeightFiles:
    """The ASGI application; mount it at `MOUNT`. It sends files below `folder`; with `only`, just those of the resource of that
    name."""

    def __init__(self, store: Store, authenticator: Authenticator, folder: Path, only: str = "") -> None:
        self._projects, self._authenticator, self._only = Projects(store), authenticator, only
        self._root = folder.resolve()
        self._digests = Bounded[Stamp, str](REMEMBERED)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="lightning-weights")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        file = None
        try:
            raw: bytes = scope.get("raw_path") or scope["path"].encode()
            parts = [unquote(part.decode("latin-1")) for part in raw.partition(b"?")[0].split(b"/")[2:]]
            if scope["method"] != "GET" or not 1 <= len(parts) <= 2 or not all(parts):
                raise ApiError(
                    404, "unknown_route", f"There are GET /{MOUNT}/NAME@WHICH and GET /{MOUNT}/NAME@WHICH/FILE."
                )
            resource = await self._resource(scope, parts[0])
            if len(parts) == 1:
                await answer(send, 200, json_codec.to_bytes(resource))
                return
            file = await unless(self._opened(resource, parts[1]), client_left(receive))
            if file is None:
                return
            size = os.fstat(file).st_size
            body = StreamingResponse(
                self._pieces(file, size), media_type="application/octet-stream", headers={"content-length": str(size)}
            )
            await body(scope, receive, send)
        except (ApiError, LightningError, OSError) as error:
            await refuse(send, refusal_of(error, f"GET /{MOUNT}"))
        finally:
            if file is not None:
                os.close(file)

    async def _resource(self, scope: Scope, named: str) -> Resource:
        principal = await self._authenticator.principal(authorization_in(scope))
        principal.require(TokenScope.VIEWER, TokenScope.TRAINER)
        reference = parse_reference(named)
        found = None
        if not reference.place and self._only in ("", reference.name):
            found = await get_resource(self._projects.of(principal.project), reference.name, reference.which)
        if found is None or found.kind is not ResourceKind.WEIGHTS:
            raise ApiError(
                404, "not_found", f"There are no weights {named[:200]!r}: `lightning resources ls` lists all."
            )
        return found

    async def _opened(self, resource: Resource, name: str) -> int:
        """Return a descriptor of a version's file, whose digest has been checked. Raises `ApiError` (404) for a file that the
        version does not have, `ConfigError` for a file that lies elsewhere or has another content."""
        content = resource.content if isinstance(resource.content, Mapping) else {}
        files = content.get("files")
        digest = files.get(name) if isinstance(files, Mapping) and "/" not in name else None
        if digest is None:
            raise ApiError(404, "not_found", f"{resource.name}@{resource.version} has no file {name[:200]!r}.")
        path = Path(str(content.get("path"))) / name
        try:
            file = open_below(self._root, path)
        except OSError:
            file = None
        try:
            if file is not None and await self._digest(file) == digest:
                found, file = file, None
                return found
        finally:
            if file is not None:
                os.close(file)
        raise ConfigError(
            f"the file {name} of {resource.name}@{resource.version} is gone, was changed, or is not below the folder from "
            "which this server gives files (the one of its database, or --out)"
        )

    async def _digest(self, file: int) -> str:
        state = os.fstat(file)
        stamp = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        if (known := self._digests.get(stamp)) is not None:
            return known
        digest = hashlib.sha256()
        async for piece in self._pieces(file, state.st_size):
            digest.update(piece)
        return self._digests.keep(stamp, digest.hexdigest())

    async def _pieces(self, file: int, size: int) -> AsyncIterator[bytes]:
        """Yield the first `size` bytes of a file, in pieces. Raises `OSError` when the file has become shorter."""
        loop = asyncio.get_running_loop()
        for start in range(0, size, PIECE):
            length = min(PIECE, size - start)
            piece = await loop.run_in_executor(self._readers, os.pread, file, length, start)
            if len(piece) < length:
                raise OSError("the file was cut while it was read")
            yield piece


async def client_left(receive: Receive) -> None:
    """Return when the client has closed its connection. The rest of the request's body is thrown away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def open_below(root: Path, path: Path) -> int:
    """Open a regular file below a folder for reading and return its descriptor. No symbolic link below the folder is followed.
    Raises `OSError`, also for a path that is not below `root` or is no regular file."""
    parts = path.relative_to(root).parts if path.is_relative_to(root) else ()
    if not parts or ".." in parts:
        raise FileNotFoundError(f"{path} is not below {root}")
    above = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            os.close(above)
            above = inner
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
    finally:
        os.close(above)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(f"{path} is no file")
    return file
