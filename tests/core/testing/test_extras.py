"""`lightning.testing` asks for nothing that is not used."""

from __future__ import annotations

import subprocess
import sys

import lightning.testing
import pytest

SCRIPT = """
import sys
sys.modules["pytest"] = None                         # as if it were not installed
import lightning.testing
assert lightning.testing.ChatServer and "torch" not in sys.modules
try:
    from lightning.testing import AdapterContract
except lightning.MissingExtraError as error:
    from lightning.installation import install_command
    assert install_command("testing") in str(error), error
else:
    raise SystemExit("AdapterContract was imported without pytest")
"""


def test_only_the_kit_needs_pytest() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_everything_that_is_offered_is_there() -> None:
    for name in lightning.testing.__all__:
        assert getattr(lightning.testing, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        lightning.testing.Nothing  # noqa: B018
