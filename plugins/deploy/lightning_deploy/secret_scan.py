"""Keys and passwords in what would go into an image or a manifest, found by detect-secrets.

The invariant: an error names the place and the kind, never the secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.errors import ConfigError, MissingExtraError

CODE = frozenset({".py", ".sh", ".js", ".mjs", ".ts", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".conf", ".env"})
"""Files in which a string of much entropy, or an assignment to a password, is probably a secret; in data it is data."""
GUESSES = frozenset({"Base64HighEntropyString", "HexHighEntropyString", "KeywordDetector"})


def check_no_secrets(files: Sequence[Path], project: Path) -> None:
    """Raises `ConfigError` for files that seem to hold one."""
    found = {
        (str(path), line): kind
        for code in (True, False)
        for path, line, kind in _scanned([file for file in files if (file.suffix in CODE) == code], project, code=code)
    }
    if found:
        told = "; ".join(f"{name}:{line} ({kind})" for (name, line), kind in sorted(found.items())[:5])
        raise ConfigError(
            f"there seems to be a secret in {told}: whoever has the image would have it. Read it from the environment "
            '(os.environ["NAME"]): it is then given by reference. A line that has none may end with '
            '"# pragma: allowlist secret", and a file that has none is named with --no-secret'
        )


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises `ConfigError` for an argument that seems to be one, or to hold one: it would stand in a manifest."""
    scan, settings, plugins = _library()
    for place, text in enumerate(arguments):
        with settings({"plugins_used": [{"name": name} for name in plugins if name not in GUESSES]}):
            kinds = [one.type for one in scan.scan_line(text)]
        query = text.partition("?")[2] if "://" in text else ""
        if kinds or "password=" in query:
            before = arguments[place - 1] if place else "the command"
            raise ConfigError(
                f"what follows {before} seems to hold a secret ({kinds[0] if kinds else 'a password in a URL'}), which would "
                "be in a file: give it by the environment"
            )


def _scanned(files: Sequence[Path], project: Path, *, code: bool) -> list[tuple[Path, int, str]]:
    scan, settings, plugins = _library()
    names = [{"name": name} for name in plugins if code or name not in GUESSES]
    with settings({"plugins_used": names}):
        return [(file, one.line_number, one.type) for file in files for one in scan.scan_file(str(project / file))]


def _library() -> tuple[Any, Any, list[str]]:
    try:
        from detect_secrets.core import scan
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
        from detect_secrets.settings import default_settings, transient_settings
    except ImportError as error:
        raise MissingExtraError("deploy", "detect_secrets") from error
    with default_settings():
        plugins = [kind.__name__ for kind in get_mapping_from_secret_type_to_class().values()]
    plugins.remove("IPPublicDetector")  # an address is no secret
    return scan, transient_settings, plugins
