"""`lightning pull`: copies the files of a version of weights into a folder of this machine.

The invariant: the folder is made whole, each file with the SHA-256 of the version, or not at all. The server is not trusted:
the size of a file is checked before it is written, and a file's name must be a plain one.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, cast
from urllib.parse import quote

import aiohttp
import typer
from lightning.cli.output import escape, next_steps, say, with_store
from lightning.errors import ConfigError, DataError, UnavailableError
from lightning_resources.command import locate
from lightning_resources.nouns import Resource
from lightning_resources.reference import ResourceReference, find, parse_reference
from lightning_resources.weights import checked_weights
from yarl import URL

from lightning_server import json_codec
from lightning_server.http_store.store import token_or_complain
from lightning_server.http_store.transport import problem_in, whole_body

PIECE = 1 << 20
LONGEST_ANSWER = 4 << 20
"""Largest description of a version, in bytes, that is read from a server."""
LONGEST_MESSAGE = 400
MOST_FILES = 10_000
MAX_GB = 100.0
LEFT_FREE = 1 << 28
"""Bytes of a disk that stay free."""
_DIGEST = re.compile("[0-9a-f]{64}")
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=300.0)


def pull(
    weights: Annotated[
        str,
        typer.Argument(
            metavar="[PLACE#]NAME@WHICH",
            help="The weights and a version or alias of them, such as policy/weights@production; prefix PLACE# to say where "
            "they are: a run's folder, a database, or the URL of a server (with a viewer's token in LIGHTNING_TOKEN).",
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    where: Annotated[
        str, typer.Option("--runs", metavar="PLACE", help="Where to look for names without PLACE#.")
    ] = "runs",
    max_gb: Annotated[float, typer.Option("--max-gb", help="The most that a server may send, in gigabytes.")] = MAX_GB,
) -> None:
    """Copy a version of weights into a folder, from this machine or a server."""
    if not 0 <= max_gb < math.inf:
        raise ConfigError(f"--max-gb {max_gb}: give a number of gigabytes, 0 or more")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not empty: give a folder that is not")
    reference = parse_reference(weights)
    unfinished = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        if reference.place.startswith(("http://", "https://")):
            named = asyncio.run(_download(reference, unfinished, round(max_gb * 1e9)))
        else:
            named = _copy(*locate(weights, where), unfinished)
        if folder.is_dir():
            folder.rmdir()
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    say(f"{escape(named)} is in {escape(str(folder))}, every file as it was made")
    for line in commands_for(folder):
        say(escape(line))
    next_steps(("serve it and record every call", ["serve", folder]))


def commands_for(folder: Path) -> list[str]:
    """Return one line for each other program that can load the folder; none of them is run here."""
    return [
        f"vLLM:    vllm serve {folder}",
        f"Ollama:  echo 'FROM {folder.resolve()}' > Modelfile && ollama create NAME -f Modelfile",
        f"GGUF:    python llama.cpp/convert_hf_to_gguf.py {folder} --outfile {folder.name}.gguf",
    ]


def _copy(url: str, reference: ResourceReference, into: Path) -> str:
    resource = asyncio.run(with_store(url, lambda store: find(store, reference)))
    source = checked_weights(resource)
    for name, digest in _files(resource.content).items():
        shutil.copyfile(source / name, into / name)
        _check(into / name, digest)
    return f"{resource.name}@{resource.version}"


async def _download(reference: ResourceReference, into: Path, most: int) -> str:
    """Download the files of a version from a server into `into`, and return NAME@VERSION. Raises `UnavailableError` when the
    server does not answer, `ConfigError` when it refuses or sends more than `most` bytes, `DataError` for a file whose digest
    is wrong and for an answer that is not a Lightning Server's."""
    token = token_or_complain(None)
    root = f"{reference.place.rstrip('/')}/weights/"
    headers = {"authorization": f"Bearer {token}", "accept-encoding": "identity"}
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=TIMEOUT, auto_decompress=False) as session:
            async with session.get(_url(root, f"{reference.name}@{reference.which}"), allow_redirects=False) as reply:
                resource = await _resource(reply)
            named = f"{resource.name}@{resource.version}"  # of an alias that moves meanwhile one version is fetched
            for name, digest in _files(resource.content).items():
                async with session.get(_url(root, named, name), allow_redirects=False) as reply:
                    most -= await _size(reply, name, into, most)
                    with (into / name).open("xb") as file:
                        async for piece in reply.content.iter_chunked(PIECE):
                            file.write(piece)
                await asyncio.to_thread(_check, into / name, digest)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise UnavailableError(f"{reference.place} did not give the weights: {error!r}") from error
    return named


def _url(root: str, *parts: str) -> URL:
    return URL(root + "/".join(quote(part, safe="@") for part in parts), encoded=True)


async def _resource(reply: aiohttp.ClientResponse) -> Resource:
    """Read a server's description of a version. Raises `ConfigError` when the server refuses, `DataError` for any other
    answer."""
    server, body = reply.url.origin(), await whole_body(reply, LONGEST_ANSWER)
    if reply.status != 200:
        problem = problem_in(body)
        said = " ".join(problem.message.split())[:LONGEST_MESSAGE] if problem else f"status {reply.status}"
        raise ConfigError(f"{server} refuses: {said}")
    try:
        return cast("Resource", json_codec.from_bytes(Resource, body, f"the answer of {server}"))
    except DataError as error:
        raise DataError(f"{error}. Is it a Lightning Server?") from None


async def _size(reply: aiohttp.ClientResponse, name: str, into: Path, most: int) -> int:
    """Return a file's size in bytes; the server cannot send more. Raises `ConfigError` or `DataError` when the file must not be
    written."""
    if reply.status != 200:
        await _resource(reply)  # raises
    size = reply.content_length
    if size is None or reply.headers.get("content-encoding", "identity") != "identity":
        raise DataError(
            f"{reply.url.origin()} does not say how long {name} is, or compresses it: it is not written. Is it a Lightning "
            "Server, and does a proxy before it leave content-length as it is?"
        )
    if size > most:
        raise ConfigError(
            f"{name} has {size / 1e9:.2f} GB, and {most / 1e9:.2f} GB may still come: raise --max-gb if you trust the server"
        )
    free = shutil.disk_usage(into).free
    if size + LEFT_FREE > free:
        raise ConfigError(
            f"{name} has {size / 1e9:.2f} GB, and the disk of {into.parent} only {free / 1e9:.2f} GB: free some, or name a "
            "folder on another disk"
        )
    return size


def _files(content: object) -> dict[str, str]:
    """Return the digest of each file by its name. Raises `DataError` when `content` does not describe weights, and for a name
    that is not a plain file name."""
    files = content.get("files") if isinstance(content, Mapping) else None
    if not isinstance(files, Mapping) or not 0 < len(files) <= MOST_FILES:
        raise DataError(f"what was named are no weights: they have no files, or more than {MOST_FILES}")
    for name, digest in files.items():
        if not name.isprintable() or not name or "/" in name or "\\" in name or name.startswith("."):
            raise DataError(f"the weights have a file {name[:80]!r}, which is no plain name: it is not written")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise DataError(f"the weights have a file {name[:80]!r} without a SHA-256: it is not written")
    return dict(files)


def _check(file: Path, digest: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != digest:
        raise DataError(
            f"{file.name} came with the SHA-256 {found[:12]}, not {digest[:12]}: nothing was kept; ask again"
        )
