"""`lightning pull`: the files of a version of weights into a folder of this machine.

The invariant: the folder is there whole, each file with the SHA-256 that the version was made with, or not at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import aiohttp
import typer
from yarl import URL

from lightning.cli.locate import with_store
from lightning.cli.output import escape, say
from lightning.cli.resources import locate
from lightning.errors import ConfigError, DataError, UnavailableError
from lightning.store.resource_ref import ResourceReference, find, parse_reference
from lightning.trainer.checkpoints import checked_weights

PIECE = 1 << 20
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=300.0)


def pull(
    weights: Annotated[
        str,
        typer.Argument(
            metavar="[PLACE#]NAME@WHICH",
            help="The weights, such as policy/weights@production; PLACE is a run's folder, a database, or the URL of a server "
            "(with a viewer's token in LIGHTNING_TOKEN).",
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    where: Annotated[
        str, typer.Option("--runs", metavar="PLACE", help="Where to look for names without PLACE#.")
    ] = "runs",
) -> None:
    """Copy a version of weights into a folder, from this machine or a server."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not empty: give a folder that is not")
    reference = parse_reference(weights)
    unfinished = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        if reference.place.startswith(("http://", "https://")):
            named = asyncio.run(_download(reference, unfinished))
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


def commands_for(folder: Path) -> list[str]:
    """How other programs take such a folder: nothing of it is run here."""
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


async def _download(reference: ResourceReference, into: Path) -> str:
    """Raises `UnavailableError` for a server that does not answer, `ConfigError` for what it refuses, `DataError` for a
    file that came otherwise than it was made."""
    token = os.environ.get("LIGHTNING_TOKEN", "")
    if not token:
        raise ConfigError("a server gives weights to tokens only: set LIGHTNING_TOKEN (lightning token create viewer)")
    root = f"{reference.place.rstrip('/')}/weights/"
    headers = {"authorization": f"Bearer {token}"}
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=TIMEOUT) as session:
            async with session.get(_url(root, f"{reference.name}@{reference.which}")) as reply:
                said = await _answer(reply)
            named = f"{said['name']}@{said['version']}"  # of an alias that moves meanwhile one version is fetched
            for name, digest in _files(said.get("content")).items():
                async with session.get(_url(root, named, name)) as reply:
                    if reply.status != 200:
                        await _answer(reply)
                    with (into / name).open("wb") as file:
                        async for piece in reply.content.iter_chunked(PIECE):
                            file.write(piece)
                await asyncio.to_thread(_check, into / name, digest)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise UnavailableError(f"{reference.place} did not give the weights: {error!r}") from error
    return named


def _url(root: str, *parts: str) -> URL:
    return URL(root + "/".join(quote(part, safe="@") for part in parts), encoded=True)


async def _answer(reply: aiohttp.ClientResponse) -> Mapping[str, object]:
    try:
        said = await reply.json(content_type=None)
    except ValueError:
        said = None
    if reply.status != 200 or not isinstance(said, Mapping):
        error = said.get("error") if isinstance(said, Mapping) else None
        message = error.get("message") if isinstance(error, Mapping) else f"status {reply.status}"
        raise ConfigError(f"{reply.url.origin()} refuses: {message}")
    return said


def _files(content: object) -> dict[str, str]:
    files = content.get("files") if isinstance(content, Mapping) else None
    if not isinstance(files, Mapping) or not files:
        raise DataError("what was named are no weights: they have no files")
    if bad := [name for name in files if not name or "/" in name or name.startswith(".")]:
        raise DataError(f"the weights have a file {bad[0]!r}, which is no plain name: it is not written")
    return {str(name): str(digest) for name, digest in files.items()}


def _check(file: Path, digest: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != digest:
        raise DataError(
            f"{file.name} came with the SHA-256 {found[:12]}, not {digest[:12]}: nothing was kept; ask again"
        )
