"""An adapter that is packaged by itself: installed, found by its entry point, and held to the conformance kit.

Then broken on purpose in one way after the other, to see that the kit notices and says what is wrong.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SABOTAGES = {
    "TestForgetsToReset::test_every_call_is_named": "after the agent had ended, in the same task",
    "TestKeepsStateAfterErrors::test_provider_failure_surfaces": "after the agent had ended, in the same task",
    "TestKeepsStateAfterErrors::test_cancelling_leaves_no_state[plain]": "after the run was cancelled, in the same task",
    "TestCallsEveryToolOk::test_tools_are_reported": "'error' when it raised",
    "TestMakesUpCallIds::test_tool_events_name_their_call": "ToolEvent.call_id of the runs: ['1', '1']",
    "TestOneGlobalForAll::test_nested_parallel_agents_keep_their_names": "solver makes 2 calls and echo one",
    "TestOneGlobalForAbandonedRuns::test_abandoned_run_leaves_no_state": "after the run was abandoned, in the same task",
    "TestBlocksTheLoop::test_abandoned_run_leaves_no_state": "run() blocks the event loop",
    "TestCannotBeUndone::test_uninstalling_leaves_no_trace": "after the adapter was uninstalled it still holds",
    "TestChangesWhatTheModelReads::test_agent_is_unchanged[plain-hi]": "the agent sends another request",
    "TestOneSpanForAll::test_calls_have_spans": "two model calls share a span id",
    "TestNewSpanForEachRequest::test_retries_keep_one_identity": "they are one call",
    "TestNewSpanForEachRequest::test_identify_is_steady": "asking must change nothing",
    "TestForgetsOuterAgents::test_nested_parallel_agents_keep_their_names": "should hold boss, ask_math and solver",
    "TestReplacesTheUsersListeners::test_own_processor_beside_ours": "the user's own processor, attached before",
    "TestPhonesHome::test_every_call_is_named": "traces.acme.example",
    "TestRaises::test_every_call_is_named": "lightning_identify() raised",
    "TestRaisesInItsCallback::test_every_call_is_named": "ZeroDivisionError",
    "TestTooOld::test_every_call_is_named": "lightning>=99,<100",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package's tests; `site` in it is where the package has been installed."""
    folder = tmp_path_factory.mktemp("acme")
    shutil.copytree(ROOT / "examples/third_party_adapter", folder / "source")
    shutil.copytree(folder / "source/tests", folder / "tests")
    shutil.copy(Path(__file__).with_name("sabotage_acme.py"), folder / "tests/test_sabotage.py")
    install = ["uv", "pip", "install", "--no-deps", "--no-build-isolation", "--target", folder / "site"]
    subprocess.run([sys.executable, "-m", *install, folder / "source"], check=True, capture_output=True)
    return folder


def run(folder: Path, *tests: str) -> dict[str, str]:
    """Run tests where only the installed package can be found; what failed, with its message."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(folder / "site"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert report.exists(), ran.stdout + ran.stderr
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        problems = [*case.iter("failure"), *case.iter("error")]
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found[name] = "\n".join(f"{item.get('message')}\n{item.text}" for item in problems)
    assert found, ran.stdout + ran.stderr
    return found


def test_the_example_passes_the_kit(installed: Path) -> None:
    ran = run(installed, "tests/test_contract.py")
    assert len(ran) >= 25
    assert {name: text for name, text in ran.items() if text} == {}


def test_the_kit_sees_what_is_wrong(installed: Path) -> None:
    ran = run(installed, *(f"tests/test_sabotage.py::{name}" for name in SABOTAGES))
    assert set(ran) == set(SABOTAGES)
    missed = [f"{name}: {ran[name] or 'passed'}" for name, said in SABOTAGES.items() if said not in ran[name]]
    assert not missed, "\n\n".join(missed)
