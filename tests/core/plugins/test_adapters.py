"""Adapters attach when their framework is there, answer who is calling, and leave no trace."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable

import pytest
from lightning.errors import PluginError
from lightning.plugins import Plugins
from lightning.plugins.attached_adapters import failed_adapter
from lightning.types import Caller, ToolEvent

ADAPTER = """
from lightning import Caller, hookimpl
log, current = [], None

@hookimpl
def lightning_install(emit):
    log.append("install")
    emits.append(emit)
    return lambda: log.append("undo")

@hookimpl
def lightning_identify():
    return current

emits = []
"""


@pytest.fixture(autouse=True)
def only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "LIGHTNING_DISABLE_PLUGINS", "raw,langchain,openai-agents,autogen,crewai,dspy,llama-index,smolagents,otel"
    )


def ignore(event: ToolEvent) -> None:
    """Takes an event and forgets it."""


def test_install_and_undo(install) -> None:
    install("fw", {"fw": "fw_plugin"}, {"fw_plugin": ADAPTER})
    plugins = Plugins()
    assert plugins.identify() is None
    undo = plugins.install_adapters(ignore)
    module = sys.modules["fw_plugin"]
    module.current = Caller("writer")
    assert plugins.identify() == Caller("writer")
    undo()
    undo()
    assert module.log == ["install", "undo"]


def test_a_first_question_from_several_threads_loses_no_name(install) -> None:
    slow = ADAPTER.replace(
        "log, current = [], None", "import time; time.sleep(0.2); log, current = [], Caller('writer')"
    )
    install("fw", {"fw": "fw_plugin"}, {"fw_plugin": slow})
    plugins, found = Plugins(), list[Caller | None]()
    threads = [threading.Thread(target=lambda: found.append(plugins.identify())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [*found, plugins.identify()] == [Caller("writer")] * 5


def test_an_adapter_waits_for_its_framework_and_the_watch_leaves_no_trace(install) -> None:
    install("lib", modules={"framework_x": "from framework_x_part import value", "framework_x_part": "value = 1"})
    install("fw", {"fw.framework_x": "fw_plugin"}, {"fw_plugin": ADAPTER})
    before = list(sys.meta_path)
    plugins = Plugins()
    undo = plugins.install_adapters(ignore)
    assert "fw_plugin" not in sys.modules
    assert len(sys.meta_path) == len(before) + 1
    framework = importlib.import_module("framework_x")
    assert sys.modules["fw_plugin"].log == ["install"]
    assert framework.value == 1
    assert type(framework.__loader__).__name__ == "SourceFileLoader"
    assert framework.__spec__.loader is framework.__loader__
    undo()
    assert sys.meta_path == before
    assert sys.modules["fw_plugin"].log == ["install", "undo"]


def test_a_framework_that_is_there_already_needs_no_watch(install) -> None:
    install("lib", modules={"framework_y": ""})
    install("fw", {"fw.framework_y": "fw_plugin"}, {"fw_plugin": ADAPTER})
    importlib.import_module("framework_y")
    before = list(sys.meta_path)
    plugins = Plugins()
    undo = plugins.install_adapters(ignore)
    assert sys.modules["fw_plugin"].log == ["install"]
    assert sys.meta_path == before
    undo()


def test_a_framework_whose_import_fails_is_watched_on(install) -> None:
    folder = install("lib", modules={"framework_z": "raise RuntimeError('first time')"})
    install("fw", {"fw.framework_z": "fw_plugin"}, {"fw_plugin": ADAPTER})
    undo = Plugins().install_adapters(ignore)
    with pytest.raises(RuntimeError, match="first time"):
        importlib.import_module("framework_z")
    assert "fw_plugin" not in sys.modules
    (folder / "framework_z.py").write_text("answer = 'second time'")
    importlib.invalidate_caches()
    importlib.import_module("framework_z")
    assert sys.modules["fw_plugin"].log == ["install"]
    undo()


def test_an_adapter_that_breaks_when_its_framework_arrives_does_not_break_the_import(install, warnings_of) -> None:
    install("lib", modules={"framework_w": "fine = True"})
    install("fw", {"fw.framework_w": "fw_plugin"}, {"fw_plugin": "raise ValueError('too new')"})
    plugins = Plugins()
    undo = plugins.install_adapters(ignore)
    assert importlib.import_module("framework_w").fine
    assert any("ValueError: too new" in line for line in warnings_of())
    undo()


def test_importing_a_framework_never_waits_for_a_busy_plugin_table(install) -> None:
    """A thread that loads plugins may itself wait for this import: waiting for it here would never end."""
    install("lib", modules={"framework_v": ""})
    install("fw", {"fw.framework_v": "fw_plugin"}, {"fw_plugin": ADAPTER})
    slow = (
        "import threading\nfrom lightning import hookimpl\nentered, go_on = threading.Event(), threading.Event()\n"
        "@hookimpl\ndef lightning_install(emit):\n    entered.set()\n    assert go_on.wait(60)\n    return lambda: None\n"
    )
    install("slow", {"slow": "slow_plugin"}, {"slow_plugin": slow})
    plugins = Plugins()
    undo = plugins.install_adapters(ignore, ["fw"])
    busy = importlib.import_module("slow_plugin")
    undos: list[Callable[[], None]] = []
    thread = threading.Thread(target=lambda: undos.append(plugins.install_adapters(ignore, ["slow"])))
    thread.start()
    assert busy.entered.wait(60)
    importlib.import_module("framework_v")  # returns although the other thread holds the table
    assert "fw_plugin" not in sys.modules
    busy.go_on.set()
    thread.join(60)
    assert sys.modules["fw_plugin"].log == ["install"]
    undos[0]()
    undo()


def test_one_adapter_that_cannot_be_installed_is_named_and_not_asked(install, warnings_of) -> None:
    bad = (
        "from lightning import Caller, hookimpl\n@hookimpl\ndef lightning_install(emit): raise OSError('no')\n"
        "@hookimpl(tryfirst=True)\ndef lightning_identify(): return Caller('bad')\n"
    )
    install("bad", {"bad": "bad_plugin"}, {"bad_plugin": bad})
    install("fw", {"fw": "fw_plugin"}, {"fw_plugin": ADAPTER})
    plugins = Plugins()
    undo = plugins.install_adapters(ignore)
    sys.modules["fw_plugin"].current = Caller("good")
    assert plugins.identify() == Caller("good")
    assert any(
        "'bad' (bad 1.0) is not installed, its lightning_install failed: OSError('no')" in line
        for line in warnings_of()
    )
    undo()


def test_who_knows_the_model_call_is_before_who_knows_the_code_around_it(install) -> None:
    outer = ADAPTER.replace("@hookimpl\ndef lightning_identify", "@hookimpl(tryfirst=True)\ndef lightning_identify")
    assert outer != ADAPTER
    install("outer", {"outer": "outer_plugin"}, {"outer_plugin": outer})
    install("inner", {"inner": "inner_plugin"}, {"inner_plugin": ADAPTER})
    plugins = Plugins()
    undo = plugins.install_adapters(ignore)
    around, inside = Caller("node", span_id=""), Caller("writer", span_id="call-1")
    sys.modules["outer_plugin"].current, sys.modules["inner_plugin"].current = around, inside
    assert plugins.identify() == inside
    sys.modules["inner_plugin"].current = Caller("writer")
    assert plugins.identify() == around, "where nobody knows a call, order decides"
    sys.modules["outer_plugin"].current = Caller("node", span_id="call-0")
    sys.modules["inner_plugin"].current = inside
    assert plugins.identify() == Caller("node", span_id="call-0")
    undo()


FALLBACK = (
    "from lightning import Caller, hookimpl\n@hookimpl(trylast=True)\ndef lightning_identify(): return Caller('main')\n"
)
FAILING = {
    "install": "from lightning import hookimpl\n@hookimpl\ndef lightning_install(emit): raise OSError('no')\n"
    "@hookimpl\ndef lightning_identify(): return None\n",
    "raises": "from lightning import hookimpl\n@hookimpl\ndef lightning_identify(): 1 / 0\n",
    "nonsense": "from lightning import hookimpl\n@hookimpl\ndef lightning_identify(): return 'writer'\n",
}


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("body", FAILING.values(), ids=FAILING)
def test_a_call_that_a_fault_left_without_its_name_is_marked(install, body: str, fallback: bool) -> None:
    install("bad", {"bad": "bad_plugin"}, {"bad_plugin": body})
    install("last", {"last": "last_plugin"}, {"last_plugin": FALLBACK if fallback else ""})
    plugins = Plugins()
    undo = plugins.install_adapters(ignore)
    caller = plugins.identify()
    undo()
    assert caller == Caller("main" if fallback else "agent", framework="adapter-failed:bad")
    assert failed_adapter(caller) == "bad"


def test_an_adapter_that_breaks_when_it_registers_is_no_longer_asked(install) -> None:
    body = (
        "from lightning import Caller, hookimpl\n@hookimpl(tryfirst=True)\ndef lightning_identify(): return Caller('bad')\n"
        "@hookimpl\ndef register_trackers(register): 1 / 0\n"
    )
    install("bad", {"bad": "bad_plugin"}, {"bad_plugin": body})
    install("last", {"last": "last_plugin"}, {"last_plugin": FALLBACK})
    plugins = Plugins()
    assert plugins.identify() == Caller("bad")
    plugins.names("trackers")
    assert {info.name: info.state for info in plugins.plugins()}["bad"] == "broken"
    assert plugins.identify() == Caller("main")


def test_an_adapter_that_was_not_installed_marks_nothing_once_it_is_gone(install) -> None:
    install("bad", {"bad": "bad_plugin"}, {"bad_plugin": FAILING["install"]})
    install("last", {"last": "last_plugin"}, {"last_plugin": FALLBACK})
    plugins = Plugins()
    plugins.install_adapters(ignore)()
    undo = plugins.install_adapters(ignore, ["last"])
    assert plugins.identify() == Caller("main")
    undo()


@pytest.mark.parametrize("body", ["1 / 0", "return 'writer'"])
def test_identify_never_raises_and_complains_once(install, warnings_of, body: str) -> None:
    bad = f"from lightning import hookimpl\n@hookimpl(tryfirst=True)\ndef lightning_identify():\n    {body}\n"
    install("bad", {"bad": "bad_plugin"}, {"bad_plugin": bad})
    install("fw", {"fw": "fw_plugin"}, {"fw_plugin": ADAPTER})
    plugins = Plugins()
    plugins.plugins()
    sys.modules["fw_plugin"].current = Caller("good")
    assert [plugins.identify() for _ in range(3)] == [Caller("good")] * 3
    assert len([line for line in warnings_of() if "lightning_identify" in line]) == 1


def test_only_adapters_asked_for_by_name_are_installed_and_asked(install) -> None:
    install("fw", {"fw": "fw_plugin"}, {"fw_plugin": ADAPTER})
    install("other", {"other": "other_plugin"}, {"other_plugin": ADAPTER})
    plugins = Plugins()
    undo = plugins.install_adapters(ignore, ["fw"])
    sys.modules["other_plugin"].current = Caller("other")
    assert sys.modules["other_plugin"].log == []
    assert plugins.identify() is None
    undo()
    assert plugins.identify() == Caller("other")


def test_an_adapter_asked_for_by_name_must_be_there(install) -> None:
    install("broken", {"broken": "broken_plugin"}, {"broken_plugin": "import no_such_module_xyz"})
    install("fw", {"fw": "fw_plugin"}, {"fw_plugin": ADAPTER})
    plugins = Plugins()
    with pytest.raises(PluginError, match=r"there is no adapter 'fww'; did you mean 'fw'\?"):
        plugins.install_adapters(ignore, ["fww"])
    with pytest.raises(PluginError, match=r"'broken' .* is broken: ModuleNotFoundError"):
        plugins.install_adapters(ignore, ["broken"])


def test_a_receiver_that_fails_stays_out_of_the_agent(install, warnings_of) -> None:
    install("fw", {"fw": "fw_plugin"}, {"fw_plugin": ADAPTER})

    def fails(event: ToolEvent) -> None:
        raise RuntimeError("full")

    undo = Plugins().install_adapters(fails)
    (emit,) = sys.modules["fw_plugin"].emits
    emit(ToolEvent("search", "ok"))
    emit(ToolEvent("search", "ok"))
    assert len([line for line in warnings_of() if "its receiver failed: RuntimeError('full')" in line]) == 1
    undo()


def test_an_undo_that_fails_does_not_keep_the_others(install, warnings_of) -> None:
    bad = (
        "from lightning import hookimpl\ndef undo(): raise OSError('stuck')\n"
        "@hookimpl\ndef lightning_install(emit): return undo\n"
    )
    install("aaa", {"aaa": "aaa_plugin"}, {"aaa_plugin": bad})
    install("fw", {"fw": "fw_plugin"}, {"fw_plugin": ADAPTER})
    install("zzz", {"zzz": "zzz_plugin"}, {"zzz_plugin": bad})
    undo = Plugins().install_adapters(ignore)
    undo()
    assert sys.modules["fw_plugin"].log == ["install", "undo"]
    assert len([line for line in warnings_of() if "was not undone" in line]) == 2
