"""The environment of a program in a rollout: the policy's address in variables that programs read, and telemetry switched off.

The invariant: no setting of the user leads a program past the gateway. Its home is empty, and the logins, addresses and keys of
the providers whose clients use the gateway are removed. All knowledge of single programs is in `CLIS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning.instrument.providers import for_rollout
from lightning.runner.worker import without_proxy
from lightning.types import LLM

ALIAS = "policy:"
"""Prefix of an agent's name in the name of the model that it asks for."""

QUIET = {
    "DO_NOT_TRACK": "1",
    "DISABLE_TELEMETRY": "1",
    "TELEMETRY_DISABLED": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "NO_UPDATE_NOTIFIER": "1",
    "NPM_CONFIG_UPDATE_NOTIFIER": "false",
}
"""Variables by which many programs switch off telemetry, traces and updates."""

LEFT_OUT = frozenset(
    {"LIGHTNING_TOKEN", "LIGHTNING_VLLM_SECRET", "CLAUDE_CONFIG_DIR", "CLAUDECODE", "CODEX_HOME", "OPENCODE_CONFIG"}
    | {"OPENCODE_CONFIG_DIR", "OPENCODE_CONFIG_CONTENT"}
    | {"XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"}
)
"""Variables that a program does not get: lightning's own, and those that name folders of settings. `for_rollout` removes
logins."""


@dataclass(frozen=True, slots=True)
class Address:
    """What a program needs to reach the policy; `name` is the agent's name."""

    llm: LLM
    name: str

    @property
    def model(self) -> str:
        """The model to ask for, which gives the calls the agent's name."""
        return self.of("")

    def of(self, part: str) -> str:
        """Return the model for a part of the program that acts as an agent of its own, such as the one that writes titles."""
        return f"{ALIAS}{self.name}{'.' + part if part else ''}"


@dataclass(frozen=True, slots=True)
class Cli:
    """The variables of one known program, and its settings that can only be in a file below the home."""

    variables: Callable[[Address], Mapping[str, str]]
    files: Callable[[Address], Mapping[str, str]] = lambda _: {}


def _claude(at: Address) -> Mapping[str, str]:
    return {
        "ANTHROPIC_MODEL": at.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": at.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": at.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": at.of("small"),
        "ANTHROPIC_SMALL_FAST_MODEL": at.of("small"),
        "CLAUDE_CODE_SUBAGENT_MODEL": at.of("subagent"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ENABLE_TELEMETRY": "0",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_BUG_COMMAND": "1",
    }


def _codex(at: Address) -> Mapping[str, str]:
    said = json.dumps  # a string of JSON is one of TOML
    text = f"""model = {said(at.model)}
model_provider = "lightning"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.lightning]
name = "lightning"
base_url = {said(at.llm.base_url)}
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[analytics]
enabled = false

[feedback]
enabled = false

[history]
persistence = "none"
"""
    return {".codex/config.toml": text}


def _opencode(at: Address) -> Mapping[str, str]:
    small, main = at.of("small"), at.model
    config = {
        "model": f"lightning/{main}",
        "small_model": f"lightning/{small}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "lightning": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "lightning",
                "options": {"baseURL": at.llm.base_url, "apiKey": at.llm.api_key},
                "models": {main: {"name": main}, small: {"name": small}},
            }
        },
    }
    return {".config/opencode/opencode.json": json.dumps(config)}


CLIS: Mapping[str, Cli] = {
    "claude": Cli(_claude),
    "codex": Cli(lambda at: {}, _codex),
    "opencode": Cli(lambda at: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}, _opencode),
}
"""The known programs, by name."""


def variables_of(program: str, llm: LLM, name: str, home: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program: the inherited one, and the policy's address in the program's variables."""
    at, policy = Address(llm, name), for_rollout(llm.base_url, llm.api_key)
    ours = {
        "HOME": str(home),
        **{key: value for key, value in policy.items() if value is not None},
        "OPENAI_API_BASE": llm.base_url,  # older clients
        "OPENAI_MODEL": at.model,
        "ANTHROPIC_MODEL": at.model,
        **QUIET,
        **without_proxy(inherited, llm.base_url),
    }
    kept = {key: value for key, value in inherited.items() if key not in LEFT_OUT and key not in policy}
    return kept | ours | (dict(CLIS[program].variables(at)) if program in CLIS else {})


def write_settings(program: str, llm: LLM, name: str, home: Path) -> None:
    """Write the files below the home for settings of a known program that have no variable."""
    if program not in CLIS:
        return
    for place, text in CLIS[program].files(Address(llm, name)).items():
        file = home / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
