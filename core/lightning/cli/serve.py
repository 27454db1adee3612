"""`lightning serve`: a model behind the gateway, for agents that run anywhere on this machine."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lightning.config import load_config, with_settings
from lightning.server import serve as serving_model
from lightning.trainer.model import resolve_model


def serve(
    model: Annotated[
        str, typer.Argument(help="A model folder, a name on a model hub, or the folder of a finished run.")
    ],
    port: Annotated[int, typer.Option(help="The gateway's port; 0 takes a free one.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the database and logs.")] = None,
    ttl: Annotated[float, typer.Option(help="Seconds for which the printed key is valid.")] = 86_400.0,
    seconds: Annotated[float | None, typer.Option(help="Stop after so many seconds instead of at Ctrl-C.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")] = None,
) -> None:
    """Serve a model through the gateway; every call is recorded."""
    console = Console()
    settings = with_settings(load_config(config, set_ or []), {"gateway.port": port} if port else {})
    trained = Path(model) / "model"
    folder = resolve_model(trained if (trained / "config.json").is_file() else model)
    place = out or Path("runs") / f"serve-{datetime.now().astimezone():%Y%m%d-%H%M%S}"

    async def run() -> None:
        console.print(f"starting vLLM on {folder} (log: {place / 'vllm.log'})", highlight=False)
        async with serving_model(folder, settings, place) as serving:
            llm = await serving.open_session("shell", ttl)
            console.print("ready; give these to any OpenAI-compatible client (Ctrl-C ends it):", highlight=False)
            for name, value in (("OPENAI_BASE_URL", llm.base_url), ("OPENAI_API_KEY", llm.api_key)):
                console.print(f"export {name}={value}", highlight=False, soft_wrap=True)
            console.print(f"model: {llm.model}", highlight=False)
            await serving.wait(seconds)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        console.print("stopped", highlight=False)
