"""Credentials are never stored, and a plugin may leave out more."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lightning import hookimpl, redaction
from lightning.config import GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.plugins import Plugins, plugins
from lightning.redaction import (
    GONE,
    RULES,
    may_be_redacted,
    redacted,
    redacted_json,
    redacted_outcome,
    redacted_span,
)
from lightning.runner.attempt_completion import report
from lightning.store.sqlite import SqliteStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.types import (
    Fault,
    Lease,
    Outcome,
    Rollout,
    Run,
    Span,
    Task,
    ToolEvent,
)

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJlLW9mLWl0"
SECRETS = [
    "sk-proj-abcdefghijklmnopqrstuvwx",
    "sk-ant-" + "b" * 24,
    JWT,
    f"lt_0123456789abcdef_{'aB3-_' * 8}xyz",
    "ghp_" + "a" * 36,
    "github_pat_" + "a" * 60,
    "hf_" + "a" * 34,
    "AKIA" + "ABCDEFGH12345678",
    "AIza" + "b" * 35,
    "xoxb-123456789012-abcdef",
]


@pytest.mark.parametrize("secret", SECRETS, ids=[secret[:3] + str(number) for number, secret in enumerate(SECRETS)])
@pytest.mark.parametrize("around", ["{}", "key={}", "Incorrect API key provided: {}. See docs", '["{}"]', "{}\n"])
def test_what_looks_like_a_credential_is_left_out(secret: str, around: str) -> None:
    text = redacted(around.format(secret), "tool.output")
    assert secret not in text
    assert GONE in text


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abcdef", "abcdef"),
        ("authorization=Token 12345", "12345"),
        ("GET / HTTP/1.1\r\nCookie: session=12345; b=2\r\nHost: x", "12345"),
        ("Set-Cookie: id=12345; Path=/", "12345"),
        ("{'x-api-key': '12345', 'a': 1}", "12345"),
        ('{"api_key": "12345"}', "12345"),
        ("API-KEY : 12345", "12345"),
        ("curl -H 'authorization: Basic dXNlcjpwYXNzd29yZA=='", "dXNlcjpwYXNzd29yZA"),
        ("sent bearer abcdefghijklmnop to it", "abcdefghijklmnop"),
        ("postgresql://me:12345@db/lightning", "12345"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE12345\n-----END RSA PRIVATE KEY-----", "12345"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE12345 and no end", "12345"),
        ('Authorization: Digest username="a", response="12345"', "12345"),
        ('Cookie: a=b; c="12345", e=f', "12345"),
        ("set-cookie: s=1, t=12345", "12345"),
        ("headers {'authorization': 'Digest a=\"b\", response=12345'}", "12345"),
        ('curl -H "Cookie: a=b, c=12345" http://x', "12345"),
        ('{"password":"12345"}', "12345"),
        ('{"password": "a\\"12345"}', "12345"),
        ('{"accessToken":"12345", "a": 1}', "12345"),
        ("AWS_SECRET_ACCESS_KEY=abc/12345", "12345"),
        ('{"aws_secret_access_key": "12345"}', "12345"),
        ("password=12345", "12345"),
        ('{"secret": "12345"}', "12345"),
        ("postgresql://u:p@ss:12345@h/db", "12345"),
        ("postgresql://u:12345@ss:w@h/db", "12345"),
    ],
)
def test_printed_headers_and_settings_are_left_out(text: str, secret: str) -> None:
    assert secret not in redacted(text, "tool.output")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The cookie recipe: flour, sugar",
        "max_tokens=128, tokens: 5",
        "see https://example.org:8000/path?x=1",
        "the basic idea of bearer tokens",
        "SELECT key FROM api",
        "risk-averse task-force ask-me-anything",
        "the secret is out: a password: whatever you like",
        "eyJ is how a JSON web token begins",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redacted(text, "tool.output") == text


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200).filter(lambda text: redacted(text, "x") == text))
def test_what_is_redacted_once_is_not_redacted_again_and_secrets_go_from_anywhere(text: str) -> None:
    secret = "sk-proj-abcdefghijklmnopqrstuvwx"
    assert secret not in redacted(f"{text} {secret} {text}", "x")
    once = redacted(f"{text} authorization: {secret}\n{text}", "x")
    assert redacted(once, "x") == once


WORST = {
    "authorization": (
        "cookie",
        "authorization ",
        "'cookie': '",
        'cookie":"\\',
        "cookie'  ",
        "'a-a-a-cookie",
        'cookie: "',
    ),
    "api-key": (
        "api_key= ",
        "secret",
        "password=",
        "password   ",
        "secret_access_key '",
        "auth_token",
        'password":"\\',
    ),
    "bearer ": ("Bearer ", "Basic  ", "Bearer a.b.c"),
    "lt_": ("lt_", "lt_0123456789abcdef_"),
    "eyj": ("eyJ", "eyJaaaaaaaa.", "eyJaaaaaaaa.eyJ "),
    "sk-": ("sk-", " sk-a"),
    "hf_": ("hf_", " hf_a"),
    "ghp_": ("ghp_", " gho_a"),
    "github_pat_": ("github_pat_", "github_pat_a "),
    "xoxa-": ("xoxa-", " xoxb-a"),
    "akia": ("AKIA", " AKIAAAAAAAAAAAAAAAAAA_"),
    "aiza": ("AIza", "AIza-"),
    "private key-----": (
        "private key-----",
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN AA",
        "-----BEGIN A PRIVATE KEY----",
    ),
    "://": ("://", "://a:", "://a:b", "://:::"),
}
"""By a rule's first hint: what, repeated, keeps it busy for longest. Spaces, letters and line ends behind it do so for some."""


def steps(look: Callable[[], object]) -> float:
    """CPU seconds of a look through a text, of the fastest of three."""
    took = []
    for _ in range(3):
        began = time.process_time()
        look()
        took.append(time.process_time() - began)
    return min(took)


def test_every_rule_has_its_worst_case() -> None:
    assert [rule.hints[0] for rule in RULES] == list(WORST)


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("filler", ["", " ", "a", "\n", '"'])
@pytest.mark.parametrize("piece", [piece for pieces in WORST.values() for piece in pieces])
def test_four_times_the_text_takes_about_four_times_as_long(
    piece: str, filler: str, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated alone, and once or twice with a long filling."""
    monkeypatch.setattr(redaction, "LONG", 0 if long else sys.maxsize)
    size = 6_000
    for make in (
        (lambda n: (piece + filler) * (n // (len(piece) + len(filler)))),
        (lambda n: piece + (filler or "-") * n + piece),
    ):
        once, four = (steps(partial(redacted, make(n), "x")) for n in (size, 4 * size))
        assert four < 10 * once + 0.005, "16 times where it is quadratic"


@pytest.mark.parametrize("filler", ["", " ", "a", "\n", '"', "\n'''''", "'\t"])
@pytest.mark.parametrize("piece", ["password", *(piece for pieces in WORST.values() for piece in pieces)])
def test_so_does_the_quick_look(piece: str, filler: str) -> None:
    """Line ends and quotes behind a name may be read in several ways, which must not be tried one by one."""
    for make in (
        (lambda n: (piece + filler) * (n // len(piece + filler))),
        (lambda n: piece + (filler or "-") * (n // len(filler or "-")) + piece),
    ):
        once, four = (steps(partial(may_be_redacted, json.dumps(make(n)).encode())) for n in (6_000, 24_000))
        assert four < 10 * once + 0.005


PIECES = [
    *sorted({piece for pieces in WORST.values() for piece in pieces}),
    ": abcdefgh", "=", "'", '"', " ", "\n", "a" * 45, "-", ".", "@", "-----END", "İ", "é", "0123456789abcdef_", "key", ",",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
@example('x-cookie: a "b-cookie": c')
@example("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END")
def test_a_long_text_loses_what_a_short_one_does(text: str) -> None:
    for rule in RULES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(redaction, "LONG", 0)
            assert redaction._substituted(rule, text, text.lower()) == rule.pattern.sub(rule.instead, text)


@pytest.mark.parametrize("piece", ["a_", "secret_", "-", "api_key.", "x", "secret-access"])
def test_only_the_end_of_a_name_is_looked_at(piece: str) -> None:
    """A name of 4 MB took 8 s as a whole; now 4 MB take what 100 characters do."""
    seen = []

    class Pattern:
        def search(self, text: str) -> object:
            seen.append(len(text))
            return redaction_name.search(text)

    redaction_name = redaction.SECRET_NAME
    name = piece * (4_000_000 // len(piece))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redaction, "SECRET_NAME", Pattern())
        assert redacted_json({name: "kept", f"{name}_password": "12345"}, "x") == {
            name: "kept",
            f"{name}_password": GONE,
        }
    assert seen == [redaction.LONGEST_NAME] * 2


def test_what_steers_a_terminal_is_not_stored_in_an_error() -> None:
    error = "ValueError: \x1b]0;owned\x07\x1b[2J\r\x9b31m\ttab\nline ü"
    kept = redacted_outcome(Outcome(fault=Fault.AGENT, error=error)).error
    assert kept == "ValueError: \\x1b]0;owned\\x07\\x1b[2J\\r\\x9b31m\ttab\nline ü"


def test_values_under_the_names_of_credentials_go_whole() -> None:
    said = redacted_json(
        {
            "http.request.header.authorization": ["Bearer 12345"],
            "http.response.header.set-cookie": ["a=12345"],
            "config": {
                "password": "12345",
                "client_secret": {"a": "12345"},
                "secret": "12345",
                "aws_secret_access_key": "12345",
                "accessToken": "12345",
                "API_KEY": 12345,
                "tokens": 5,
                "cookies": "no",
            },
            "gen_ai.usage.input_tokens": 7,
            "empty": {"password": ""},
        },
        "span.attributes",
    )
    assert "12345" not in json.dumps(said)
    assert said["gen_ai.usage.input_tokens"] == 7  # type: ignore[index,call-overload]
    assert said["config"]["tokens"] == 5  # type: ignore[index,call-overload]
    assert said["config"]["cookies"] == "no"  # type: ignore[index,call-overload]


def test_what_is_nested_too_deep_is_left_out() -> None:
    value: object = "sk-proj-abcdefghijklmnopqrstuvwx"
    for _ in range(500):
        value = [value]
    assert "sk-proj" not in json.dumps(redacted_json(value, "x"))  # type: ignore[arg-type]


# plugins ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def plugin() -> Iterator[Callable[[object], None]]:
    """Register an object as a plugin for one test."""
    manager = plugins()._manager
    plugins().hook  # noqa: B018 — all others are loaded now
    added: list[object] = []

    def add(one: object) -> None:
        manager.register(one, f"redactor-{len(added)}")
        added.append(one)

    yield add
    for one in added:
        manager.unregister(one)


LEAVES_OUT = """
from lightning import hookimpl

@hookimpl
def lightning_redact(text):
    return text.replace("Ada", "[name]")
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """The plugins of a process that has not looked for any."""
    found = Plugins()
    monkeypatch.setattr(redaction, "plugins", lambda: found)
    return found


def test_plugins_are_looked_for_once_when_the_first_text_is_redacted(install, fresh, monkeypatch) -> None:
    install("names", {"names": "names_plugin"}, {"names_plugin": LEAVES_OUT})
    assert redacted("Ada", "error") == "[name]"
    monkeypatch.setattr(Plugins, "hook", property(lambda plugins: pytest.fail("they were looked for again")))
    assert redacted("Ada", "error") == "[name]"
    assert may_be_redacted(b"plain")


def test_a_plugin_whose_framework_is_imported_later_redacts_from_then_on(install, fresh) -> None:
    """Also where nobody but this asks for plugins."""
    install("lib", modules={"framework_r": ""})
    install("names", {"names.framework_r": "names_plugin"}, {"names_plugin": LEAVES_OUT})
    assert redacted("Ada", "error") == "Ada"
    assert not may_be_redacted(b"plain")
    importlib.import_module("framework_r")
    assert may_be_redacted(b"plain")
    assert redacted("Ada", "error") == "[name]"


@pytest.mark.parametrize("late", [False, True])
def test_a_text_waits_while_another_thread_loads_plugins(install, fresh, monkeypatch, late: bool) -> None:
    """Loading may come back to the plugins, and even then no text passes by one that is not loaded yet."""
    entered, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "entered", entered, raising=False)
    monkeypatch.setattr(threading, "go_on", go_on, raising=False)
    comes_back = "from lightning import redaction\nassert redaction.redacted('Ada', 'x') == 'Ada'\n"
    waits = f"import threading\n{comes_back}threading.entered.set()\nassert threading.go_on.wait(60)\n"
    install("lib", modules={"framework_s": ""})
    install("slow", {"names.framework_s" if late else "names": "names_plugin"}, {"names_plugin": waits + LEAVES_OUT})
    if late:
        assert redacted("Ada", "error") == "Ada"
        importlib.import_module("framework_s")
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(fresh.plugins)
        assert entered.wait(60)
        saying = threads.submit(redacted, "Ada", "error")
        with pytest.raises(TimeoutError):
            saying.result(0.2)
        go_on.set()
        assert saying.result(60) == "[name]"
        loading.result(60)


def test_a_redactor_that_is_taken_out_is_asked_no_more(install, fresh) -> None:
    broken = f"{LEAVES_OUT}\n@hookimpl\ndef register_tasks(register):\n    raise ValueError('no')\n"
    install("names", {"names": "names_plugin"}, {"names_plugin": broken})
    assert redacted("Ada", "error") == "[name]"
    fresh.names("tasks")
    assert redacted("Ada", "error") == "Ada"


class Names:
    """Leaves a name out, and says where it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @hookimpl
    def lightning_redact(self, text: str, where: str) -> str | None:
        self.asked.append(where)
        return text.replace("Ada", "[name]") if "Ada" in text else None


class Shout:
    """Sees what the one before left."""

    @hookimpl
    def lightning_redact(self, text: str) -> str:
        return text.upper()


class Broken:
    """Raises, or returns nonsense."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer

    @hookimpl
    def lightning_redact(self, text: str) -> object:
        if self.answer is None:
            raise ValueError("no")
        return self.answer


def test_a_plugin_is_asked_of_every_text(plugin: Callable[[object], None]) -> None:
    names = Names()
    plugin(names)
    event = ToolEvent("find", "error", arguments={"who": ["Ada"]}, output="Ada is here", error="Ada!")
    outcome = redacted_outcome(Outcome(fault=Fault.AGENT, error="Ada failed", tool_events=(event,)))
    span = redacted_span(Span("r", 1, "f" * 32, "e" * 16, name="for Ada", error="Ada?", attributes={"a": {"b": "Ada"}}))
    assert "Ada" not in repr((outcome, span))
    assert set(names.asked) == {
        "outcome.error", "tool.arguments", "tool.output", "tool.error", "span.name", "span.error", "span.attributes",
    }  # fmt: skip


def test_each_plugin_gets_what_the_one_before_left(plugin: Callable[[object], None]) -> None:
    plugin(Names())
    plugin(Shout())
    assert redacted("Ada", "x") in {"[NAME]", "ADA"}  # the order is that of plugins; both were asked


@pytest.mark.parametrize("answer", [None, 5, b"bytes"])
def test_a_plugin_that_fails_costs_the_text_and_not_the_secret(
    answer: object, plugin: Callable[[object], None], caplog: pytest.LogCaptureFixture
) -> None:
    plugin(Broken(answer))
    assert redacted("a private matter", "x") == "[left out: the plugin 'redactor-0' failed to redact it]"
    assert "a private matter" not in caplog.text
    assert "redactor-0" in caplog.text


# what lies on the disk ----------------------------------------------------------------------------------------------
@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[SqliteStore, Gateway, Lease]]:
    """A gateway over a database in a folder, and a leased rollout."""
    async with FakeVLLM() as fake:
        store = SqliteStore(folder / "lightning.db")
        await store.open()
        await store.put_run(Run("run", "run"))
        await store.create_rollouts([Rollout("run/0", "run", Task("find it"), "g")])
        (lease,) = await store.lease("run", "worker")
        gateway = Gateway(store, [Upstream(fake.url, fake.model)], GatewayConfig(), secret=b"the secret of this test")
        await gateway.start()
        try:
            yield store, gateway, lease
        finally:
            await gateway.close()
            await store.close()


async def test_no_credential_of_a_run_lies_in_its_database_or_in_a_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = {
        name: f"{name.upper()}12345678901234567890" for name in ("cookie", "apikey", "password", "proxy", "forwarded")
    }
    async with served(tmp_path) as (store, gateway, lease):
        llm = gateway.llm(lease)
        headers = {
            "authorization": f"Bearer {llm.api_key}",
            "cookie": f"session={secrets['cookie']}",
            "proxy-authorization": f"Basic {secrets['proxy']}",
            "x-forwarded-authorization": secrets["forwarded"],
        }
        async with httpx.AsyncClient(base_url=llm.base_url, timeout=20) as client:
            chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            assert (await client.post("chat/completions", json=chat, headers=headers)).status_code == 200
            asked = {"input": f"password={secrets['password']}"}
            assert (await client.post("responses", json=asked, headers=headers)).status_code == 200
            for path, status in (("chat/completions", 200), ("nowhere", 404)):
                assert (await client.post(f"{llm.url_with_token}/{path}", json=chat)).status_code == status
            spans = spans_with(secrets, llm.api_key)
            assert (await client.post("traces", json=spans, headers=headers)).status_code == 200
        event = ToolEvent(
            "http",
            "error",
            arguments={"headers": {"x-api-key": secrets["apikey"]}, "password": secrets["password"]},
            output=f"Set-Cookie: {secrets['cookie']}",
            error=f"401 for Bearer {llm.api_key}",
        )
        await report(store, "run/0", 1, Outcome(reward=1.0, tool_events=(event,), error=f"key {llm.api_key}"))
        (kept,) = list((await store.attempts_of([("run/0", None)]))[0].tool_events)
        assert (kept.name, kept.status) == ("http", "error")
        stored = next(one for one in plugins().operations() if one.name == "spans")
        assert len(await stored(store, "run/0")) == 1
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"redacted" in written, "the file was looked at before it was written"
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name != "httpx")  # the client's own
    for secret in (*secrets.values(), llm.api_key):
        assert secret.encode() not in written
        assert secret not in logged


def spans_with(secrets: dict[str, str], key: str) -> dict[str, object]:
    """An OTLP request with one span full of credentials."""
    values = {
        "http.request.header.authorization": f"Bearer {key}",
        "http.request.header.cookie": secrets["cookie"],
        "db.connection_string": f"postgresql://me:{secrets['password']}@db/x",
        "error.message": f"Incorrect x-api-key: {secrets['apikey']}",
    }
    attributes = [{"key": name, "value": {"stringValue": value}} for name, value in values.items()]
    span = {"traceId": "f" * 32, "spanId": "e" * 16, "name": f"GET with Bearer {key}", "attributes": attributes}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


def test_what_must_stay_exact_stays() -> None:
    outcome = Outcome(reward=0.5, rewards={"a": 0.25}, seconds=1.5, tool_events=(ToolEvent("t", "ok", "call-1"),))
    assert redacted_outcome(outcome) == outcome
    span = Span("r", 1, "f" * 32, "e" * 16, attributes={"n": 5, "l": [1.5, True, None]})
    assert redacted_span(span) == replace(span)


AROUND = st.text(st.sampled_from("ab \n\t\"'\\:=@/._-€é\u2003{}[],"), max_size=12)
NAMES = [
    "password",
    "x-api-key",
    "client_secret",
    "AccessToken",
    "refresh-token",
    "Set-Cookie",
    "private_key",
    "my_secret_access_key",
]
FORMS = [
    *SECRETS,
    "Bearer " + "a" * 12,
    "basic  " + "dXNlcjpwYXNz" * 2,
    "postgres://me:hush@host/x",
    "-----BEGIN PRIVATE KEY-----\nabc",
]


@given(
    AROUND,
    st.sampled_from([*FORMS, *(f"{name}{mark}x" for name in NAMES for mark in (": ", "=", "' : '", '"\n="'))]),
    AROUND,
)
def test_the_quick_look_misses_nothing_that_the_rules_find(before: str, secret: str, after: str) -> None:
    text = before + secret + after
    for written in (json.dumps, lambda value: json.dumps(value, ensure_ascii=False)):
        for value in (text, {"content": text}, [{"a": [text]}]):
            if redacted_json(value, "request") != value:
                assert may_be_redacted(written(value).encode()), value


@pytest.mark.parametrize(
    "name", [*NAMES, "authorization", "http.request.header.cookie", "passwd", "apikey", "app.secret"]
)
def test_the_quick_look_knows_the_names_of_credentials(name: str) -> None:
    value = {name: "x"}
    assert redacted_json(value, "request") != value
    assert may_be_redacted(json.dumps(value).encode())
    assert may_be_redacted(json.dumps(value, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "text",
    ["coo\u212aie: a=b", "'coo\u212aie': 'a=b'", "api_\u212aey=hush", "pa\u017fsword=hush", "ba\u017fic " + "a" * 20],
)
def test_letters_that_only_unicode_takes_for_those_of_a_name_are_none(text: str) -> None:
    """The sign of the kelvin and the long s: the quick look at bytes knows neither."""
    for value in ({"content": text}, {text.partition("=")[0].partition(":")[0]: "hush"}):
        assert redacted_json(value, "request") == value
        assert not may_be_redacted(json.dumps(value, ensure_ascii=False).encode())


def test_the_quick_look_leaves_common_words_alone() -> None:
    said = "The max_tokens of a basic idea, task-0123456789abcdef, a secret or password, result_x at https://example.org/a:b"
    assert not may_be_redacted(json.dumps({"messages": said, "max_tokens": 5, "token": "x"}).encode())
