"""Plugins are found by entry point; a broken one is named and costs the others nothing."""

from __future__ import annotations

import sys

import pytest
from lightning import __version__, hooks
from lightning.errors import PluginError
from lightning.installation import install_command
from lightning.plugins import Plugins
from lightning.plugins.discovery import RegisteredNames

CREDIT = """
from lightning import hookimpl

def zero(*args):
    return []

@hookimpl
def register_credits(register):
    register({name!r}, zero)
"""


def info(plugins: Plugins, name: str):
    return next(item for item in plugins.plugins() if item.name == name)


def test_a_strangers_plugin_is_ten_lines(install) -> None:
    install("stranger", {"stranger": "stranger_plugin"}, {"stranger_plugin": CREDIT.format(name="zero")})
    plugins = Plugins()
    assert plugins.credit("zero") is sys.modules["stranger_plugin"].zero
    found = info(plugins, "stranger")
    assert (found.distribution, found.version, found.state) == ("stranger", "1.0", "loaded")
    assert found.hooks == ("register_credits",)


def test_first_party_plugins_load_by_entry_point() -> None:
    plugins = Plugins()
    assert {"memory", "sqlite"} <= set(plugins.names("stores"))
    assert {"jsonl", "tensorboard"} <= set(plugins.names("trackers"))
    assert {"inline", "process"} <= set(plugins.names("runners"))
    assert {item.distribution for item in plugins.plugins()} >= {"lightning"}


def test_nothing_is_looked_for_before_the_first_question(install) -> None:
    plugins = Plugins()
    install("late", {"late": "late_plugin"}, {"late_plugin": CREDIT.format(name="late")})
    assert "late" in plugins.names("credits")


def test_an_object_can_be_a_plugin(install) -> None:
    source = (
        "from lightning import hookimpl\nclass P:\n    @hookimpl\n"
        "    def register_credits(self, register): register('of', len)\np = P()"
    )
    install("objects", {"objects": "objects_plugin:p"}, {"objects_plugin": source})
    assert Plugins().credit("of") is len


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module_xyz", "ModuleNotFoundError: No module named 'no_such_module_xyz'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import lightning.store.rules", "ModuleNotFoundError: No module named 'lightning.store.rules'"),
        (
            "from lightning.store.protocol import Watch",
            "ImportError: cannot import name 'Watch' from 'lightning.store.prot",
        ),
        ("def (:", "SyntaxError"),
        (
            "from lightning import hookimpl\n@hookimpl\ndef register_credit(register): pass",
            "it implements 'register_credit', which is no hook; did you mean 'register_credits'?",
        ),
        (
            "from lightning import hookimpl\n@hookimpl\ndef register_credits(registrar): pass",
            "its register_credits takes 'registrar'; the hook is register_credits(register)",
        ),
        (
            "from lightning import hookimpl\n@hookimpl(wrapper=True)\ndef lightning_identify(): return (yield)",
            "its lightning_identify is a wrapper",
        ),
        ("def lightning_identify(): return None", "put @lightning.hookimpl above it"),
        (
            "from lightning import hookimpl\n@hookimpl\ndef register_credits(register): register('x', 3)",
            "register_credits wants register(name, function), not register('x', 3)",
        ),
        (
            "from lightning import hookimpl\n@hookimpl\ndef register_credits(register): register('tail', OSError)",
            "register_credits wants the credit function itself, not its class OSError: register('tail', OSError())",
        ),
        (
            "from lightning import hookimpl\n@hookimpl\ndef register_credits(register): raise OSError('no disk')",
            "OSError: no disk",
        ),
        (
            "from lightning import MissingExtraError\nraise MissingExtraError('torch', 'torch')",
            install_command("torch"),
        ),
    ],
)
def test_a_broken_plugin_is_named_and_costs_the_others_nothing(install, warnings_of, source: str, said: str) -> None:
    install("broken", {"broken": "broken_plugin"}, {"broken_plugin": source})
    install("sound", {"sound": "sound_plugin"}, {"sound_plugin": CREDIT.format(name="sound")})
    plugins = Plugins()
    assert "sound" in plugins.names("credits")
    found = info(plugins, "broken")
    assert found.state == "broken"
    assert said in found.error
    (line,) = [
        line for line in warnings_of() if f"'broken' (broken 1.0) is broken with lightning {__version__}: " in line
    ]
    assert said in line
    assert "pip install" in line
    with pytest.raises(PluginError, match="which might have it, is broken") as caught:
        plugins.credit("wanted")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("requires", "unmet"),
    [
        ("lightning<0.0.9", "lightning<0.0.9"),
        ("Lightning[torch]>=99,<100; python_version>'3'", "lightning<100,>=99"),
        ("lightning>=99; extra == 'new'", ""),
        ("lightning<1", ""),
        ("lightning-other<0.0.9", ""),
        ("lightning", ""),
    ],
)
def test_a_plugin_for_another_release_is_named_with_both_versions_and_never_imported(
    install, warnings_of, requires: str, unmet: str
) -> None:
    install("old", {"old": "old_plugin"}, {"old_plugin": CREDIT.format(name="old")}, requires=requires)
    install("sound", {"sound": "sound_plugin"}, {"sound_plugin": CREDIT.format(name="sound")})
    plugins = Plugins()
    assert "sound" in plugins.names("credits")
    error = f"it requires {unmet}, and this is lightning {__version__}" if unmet else ""
    assert (info(plugins, "old").state, info(plugins, "old").error) == ("broken" if unmet else "loaded", error)
    assert ("old_plugin" in sys.modules) == (not unmet)
    told = f"'old' (old 1.0) is broken with lightning {__version__}: {error}. To mend it: pip install --upgrade old"
    assert any(told in line for line in warnings_of()) == bool(unmet)


@pytest.mark.parametrize("requires", ["lightning>=0.1.*", "lightning<1; phase_of_the_moon == 'full'", "lightning ]["])
def test_metadata_that_cannot_be_read_breaks_its_own_plugin_alone(install, requires: str) -> None:
    install("odd", {"odd": "odd_plugin"}, {"odd_plugin": CREDIT.format(name="odd")}, requires=requires)
    install("sound", {"sound": "sound_plugin"}, {"sound_plugin": CREDIT.format(name="sound")})
    plugins = Plugins()
    assert "sound" in plugins.names("credits")
    assert info(plugins, "odd").state == "broken"
    assert info(plugins, "odd").error.startswith(f"its metadata cannot be read: {requires!r}: ")
    assert "odd_plugin" not in sys.modules


def test_a_broken_plugin_leaves_nothing_registered(install) -> None:
    source = (
        "from lightning import hookimpl\n@hookimpl\ndef register_credits(register):\n    register('half', len)\n    1 / 0\n"
        "@hookimpl\ndef step_finished(record): return 'called'"
    )
    install("half", {"half": "half_plugin"}, {"half_plugin": source})
    plugins = Plugins()
    assert "half" not in plugins.names("credits")
    assert plugins.hook.step_finished(record=None) == []


@pytest.mark.parametrize(
    "kind", [name.removeprefix("register_") for name in vars(hooks) if name.startswith("register_")]
)
def test_an_unknown_name_says_what_is_known(install, kind: str) -> None:
    source = f"from lightning import hookimpl\n@hookimpl\ndef register_{kind}(register): register('quibble', len)"
    install("known", {"known": "known_plugin"}, {"known_plugin": source})
    with pytest.raises(PluginError, match=r"did you mean 'quibble'\? Known: .*quibble"):
        Plugins().get(kind, "quibbel")


def test_plugins_that_wait_for_a_framework_are_named_in_one_sentence(install) -> None:
    install("waits", {"waits-a.no_such_a": "waits_plugin", "waits-b.no_such_b": "waits_plugin"}, {"waits_plugin": ""})
    with pytest.raises(
        PluginError, match=r"once their framework is imported: .*'waits-a' \(no_such_a\), 'waits-b' \(no_such_b\)\.$"
    ):
        Plugins().get("stores", "quibble")


def test_two_plugins_with_one_name_are_both_named(install) -> None:
    install("first", {"first": "first_plugin"}, {"first_plugin": CREDIT.format(name="twin")})
    install("second", {"second": "second_plugin"}, {"second_plugin": CREDIT.format(name="twin")})
    plugins = Plugins()
    with pytest.raises(
        PluginError, match=r"two plugins register the credit 'twin': 'first' \(first 1.0\) and 'second'"
    ):
        plugins.credit("twin")


def test_disabling_one_of_two_settles_the_quarrel(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("first", {"first": "first_plugin"}, {"first_plugin": CREDIT.format(name="twin")})
    install("second", {"second": "second_plugin"}, {"second_plugin": CREDIT.format(name="twin")})
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "other, first")
    plugins = Plugins()
    assert plugins.credit("twin") is sys.modules["second_plugin"].zero
    assert info(plugins, "first").state == "disabled"
    assert "first_plugin" not in sys.modules


def test_two_distributions_with_one_plugin_name_are_both_named(install) -> None:
    install("one", {"same": "one_plugin"}, {"one_plugin": CREDIT.format(name="one")})
    install("two", {"same": "two_plugin"}, {"two_plugin": CREDIT.format(name="two")})
    plugins = Plugins()
    (broken,) = [item for item in plugins.plugins() if item.state == "broken"]
    assert "has the same name" in broken.error
    assert broken.cure in ("pip uninstall one or two", "pip uninstall two or one")
    assert {"one", "two"} == {broken.distribution, info(plugins, "same").distribution}
    assert len({"one", "two"} & set(plugins.names("credits"))) == 1


def test_a_misspelt_name_in_the_list_of_disabled_ones_is_said(install, monkeypatch, warnings_of) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "trakers")
    assert "jsonl" in Plugins().names("trackers")
    assert any("'trakers', which is not installed; did you mean 'trackers'?" in line for line in warnings_of())


def test_an_observer_that_raises_does_not_hide_the_event_from_others(install, warnings_of) -> None:
    install(
        "bad",
        {"bad": "bad_plugin"},
        {"bad_plugin": "from lightning import hookimpl\n@hookimpl\ndef step_finished(record): 1 / 0"},
    )
    good = "from lightning import hookimpl\nseen = []\n@hookimpl\ndef step_finished(record): seen.append(record)"
    install("good", {"good": "good_plugin"}, {"good_plugin": good})
    plugins = Plugins()
    plugins.hook.step_finished(record="a record")
    plugins.hook.step_finished(record="another")
    assert sys.modules["good_plugin"].seen == ["a record", "another"]
    assert "the plugin 'bad' failed in step_finished" in warnings_of()


def test_stores_are_found_by_scheme(tmp_path) -> None:
    plugins = Plugins()
    assert type(plugins.store("memory://")).__name__ == "MemoryStore"
    assert type(plugins.store(f"SQLITE:///{tmp_path / 'a.db'}")).__name__ == "SqliteStore"
    with pytest.raises(PluginError, match=r"there is no store 'sqlit'; did you mean 'sqlite'\?"):
        plugins.store("sqlit:///a.db")
    with pytest.raises(PluginError, match=r"not a store's URL: it begins with http://, .*memory://, .*sqlite://"):
        plugins.store("runs/a.db")


BRINGS = """
from lightning.hooks import hookimpl, hookspec

@hookspec
def register_tunes(register):
    ...

@hookimpl(specname="register_tunes")
def own_tunes(register):
    register("own", len)
"""
TUNE = """
from lightning import hookimpl

@hookimpl(optionalhook=True)
def register_tunes({argument}):
    {argument}("of_another", sum)
"""


def test_a_plugin_brings_a_hook_that_others_implement_whichever_is_found_first(install) -> None:
    install("another", {"a-tune": "a_tune"}, {"a_tune": TUNE.format(argument="register")})
    install("brings", {"m-brings": "brings_tunes"}, {"brings_tunes": BRINGS})
    install("wrong", {"z-wrong": "wrong_tune"}, {"wrong_tune": TUNE.format(argument="registrar")})
    plugins = Plugins()
    assert plugins.names("tunes") == ["of_another", "own"]
    assert plugins.get("tunes", "own") is len
    with pytest.raises(PluginError, match=r"there is no tune 'ow'; did you mean 'own'\?"):
        plugins.get("tunes", "ow")
    assert info(plugins, "m-brings").hooks == info(plugins, "a-tune").hooks == ("register_tunes",)
    assert (
        info(plugins, "z-wrong").error == "its register_tunes takes 'registrar'; the hook is register_tunes(register)"
    )


def test_who_implements_the_hook_of_an_absent_plugin_says_that_it_may_be(install, monkeypatch) -> None:
    install("another", {"another": "another_tune"}, {"another_tune": TUNE.format(argument="register")})
    sure = TUNE.format(argument="register").replace("(optionalhook=True)", "")
    install("sure", {"sure": "sure_tune"}, {"sure_tune": sure})
    plugins = Plugins()
    assert info(plugins, "another").state == "loaded"
    assert "it implements 'register_tunes', which is no hook" in info(plugins, "sure").error
    assert "write @lightning.hookimpl(optionalhook=True)" in info(plugins, "sure").error
    with pytest.raises(PluginError, match="no plugin that is loaded brings the hook register_tunes"):
        plugins.names("tunes")


def test_a_hook_that_two_plugins_bring_breaks_the_second_alone(install) -> None:
    install("first", {"first": "first_tunes"}, {"first_tunes": BRINGS})
    install("second", {"second": "second_tunes"}, {"second_tunes": BRINGS})
    plugins = Plugins()
    assert plugins.names("tunes") == ["own"]
    (broken,) = [item for item in plugins.plugins() if item.state == "broken"]
    assert broken.name in ("first", "second")
    assert "'register_tunes' is already registered" in broken.error


def test_a_usual_name_of_a_plugin_that_broke_is_not_usual_for_the_next_one() -> None:
    names = RegisteredNames()
    names.take("trackers", "broken", "mine", lambda config: None, usual=True)
    names.drop("broken")
    names.take("trackers", "whole", "mine", lambda config: None)
    assert [(name, each.usual) for name, each in names.taken["trackers"].items()] == [("mine", False)]
