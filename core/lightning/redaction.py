"""Leaves out of texts, before they are stored, credentials and whatever a plugin's `lightning_redact` says.

The invariant: words of agents and their tools (errors, arguments and outputs of tools, spans, conversations) are stored only
after they passed here, and a redactor that fails costs the text, never the secret. Tasks and token ids pass as they are: an
agent works on its task, and a run is trained on the very tokens that were sampled.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pluggy import HookImpl

from lightning.plugins import plugins
from lightning.safe_text import printable
from lightning.types import Json, Outcome, Span, ToolEvent

log = logging.getLogger(__name__)

GONE = "[redacted]"
LONGEST_NAME = 100
"""Characters at the end of a name in which a credential's name is looked for: agents choose names, of any length."""
LONG = 65_536
"""Characters of a text beyond which credentials are looked for only near their hints."""
DEEPEST = 200
"""Most levels of lists and mappings that are searched; deeper values are left out."""
_NAMED_SO = (
    r"(?:[\w-]{0,40}[_-])?secret(?:[-_]access)?(?:[-_]?key)?|client[-_]?secret|password|passwd"
    r"|(?:access|refresh|auth)[-_]?token|private[-_]?key"
)
SECRET_NAME = re.compile(
    rf"(?:^|[._-])(?:authorization|cookie|set-cookie|x-api-key|api[-_]?key|{_NAMED_SO})$", re.IGNORECASE | re.ASCII
)
"""Matches ends of names whose values are always credentials: `http.request.header.authorization`."""


class _Rule(NamedTuple):
    """The form of one kind of credential. `hints` are lower-case parts, of which every match has one, at most `before`
    characters after its start: looking for hints is fast."""

    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    instead: str = GONE
    before: int = 0


# Letters of names ignore case only in ASCII (`(?a:...)`), as in the quick check below: the sign of the kelvin is no k.
RULES = (
    # A header as sent extends to the end of the line, commas and quotes included: `Cookie: a=b; c="d"`; a quoted one
    # (`'cookie': 'a=b'`, `-H 'cookie: a=b'`) ends with its quote.
    _Rule(
        ("authorization", "cookie"),
        re.compile(
            r"""((?a:authorization|cookie)["']\s*[:=]\s*)(?:"(?:[^"\\\n]++|\\.)*+"|'(?:[^'\\\n]++|\\.)*+'|[^\s"',}][^\n\r"',}]*)"""
            r"""|((?<=')(?:[\w-]{0,20}-)?(?a:authorization|cookie)\s*[:=]\s*)[^\s'][^\n\r']*"""
            r"""|((?<=")(?:[\w-]{0,20}-)?(?a:authorization|cookie)\s*[:=]\s*)[^\s"][^\n\r"]*"""
            r"""|((?a:authorization|cookie)\s*[:=]\s*)[^\s][^\n\r]*""",
            re.IGNORECASE,
        ),
        rf"\1\2\3\4{GONE}",
        before=21,
    ),
    # A setting as printed, and a credential's name in JSON: `api_key=...`, `{"password": "..."}`.
    _Rule(
        ("api-key", "api_key", "apikey", "secret", "password", "passwd", "token", "private"),
        re.compile(
            r"""((?a:api[-_]?key|secret(?:[-_]access)?(?:[-_]?key)?|password|passwd|(?:access|refresh|auth)[-_]?token"""
            r"""|private[-_]?key)(?:["']\s*[:=]|\s*=|(?<=key)\s*:)\s*)"""
            r"""(?:"(?:[^"\\\n]++|\\.)*+"|'(?:[^'\\\n]++|\\.)*+'|[^\s"',{}\[][^\n\r"',}&]*)""",
            re.IGNORECASE,
        ),
        rf"\1{GONE}",
        before=8,
    ),
    _Rule(("bearer ", "basic "), re.compile(r"\b((?a:Bearer|Basic)) +[\w.~+/=-]{12,}", re.IGNORECASE), rf"\1 {GONE}"),
    _Rule(("lt_",), re.compile(r"lt_[0-9a-f]{16}_[\w-]{43}")),
    # JSON web tokens, the gateway's among them.
    _Rule(("eyj",), re.compile(r"(?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}")),
    _Rule(("sk-",), re.compile(r"\bsk-[\w-]{20,}")),
    _Rule(("hf_",), re.compile(r"\bhf_\w{30,}")),
    _Rule(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), re.compile(r"\bgh[pousr]_\w{36,}")),
    _Rule(("github_pat_",), re.compile(r"github_pat_\w{40,}")),
    _Rule(("xoxa-", "xoxb-", "xoxp-", "xoxr-", "xoxs-"), re.compile(r"\bxox[abprs]-[\w-]{10,}")),
    _Rule(("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    _Rule(("aiza",), re.compile(r"\bAIza[\w-]{35}")),
    _Rule(
        ("private key-----",),
        re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END|\Z)", re.DOTALL),
        before=41,
    ),
    _Rule(("://",), re.compile(r"://[^\s/@:]{0,200}:[^\s/]{1,200}@"), f"://{GONE}@"),  # name:password@ in a URL
)


# A part of each rule that every match has, in lower-case JSON, where a line's end is an escape. Most texts with a hint such as
# "token" hold no credential, and these patterns show that far faster than the rules. They are possessive: a quote may be an
# escape's or stand alone, and trying both for each would take for ever.
_GAP = rb"""(?:[\s"'\x80-\xff]|\\[a-z0-9"']{1,5}+)*+[:=]"""
_WORD = rb"[\w\x80-\xff-]"
_TOKEN, _KEY = (
    rb"%b(?:%b)" % (word, b"|".join(rb"(?<=%b%b%b)" % (kind, dash, word) for kind in kinds for dash in (b"", b"[-_]")))
    for word, kinds in ((b"token", (b"access", b"refresh", b"auth")), (b"key", (b"api", b"private")))
)
# Each begins with fixed letters, which a search finds at the speed of memory. Every text is searched once for each.
_SIGNS = (
    *(rb"authorization", rb"cookie", rb"github_pat_", rb"private key-----"),
    *(name + _GAP for name in (_KEY, rb"secret(?:[-_]access)?(?:[-_]?key)?", rb"passw(?:or)?d", _TOKEN)),
    *(name + rb" +[\w.~+/=\x80-\xff-]{12}" for name in (rb"bearer", rb"basic")),
    rb"lt_[0-9a-f]{16}_",
    rb"\.eyj",
    rb"sk-" + _WORD + rb"{20}",
    rb"hf_" + _WORD + rb"{30}",
    rb"gh[pousr]_" + _WORD + rb"{36}",
    rb"xox[abprs]-" + _WORD + rb"{10}",
    *(name + rb"[a-z0-9]{16}" for name in (rb"akia", rb"asia")),
    rb"aiza" + _WORD + rb"{35}",
    rb"://[^\s/@:]{0,800}:[^\s/]{1,800}@",
)
SIGNS = tuple(map(re.compile, _SIGNS))


def may_be_redacted(text: bytes) -> bool:
    """Whether redaction may change some JSON (UTF-8); False only if it surely does not. Much faster than redacting."""
    lowered = text.lower()
    if _redactors():
        return True
    return any(sign.search(lowered) is not None for sign in SIGNS)


def _redactors() -> list[HookImpl]:
    """Return the redactors of plugins, the last to be asked first. Waits for plugins that can be loaded by now."""
    known = plugins()
    awaited = known.awaited  # taken once: another thread may be loading some
    all_loaded = awaited is not None and not any(module in sys.modules for module in awaited)
    relay = known.relay if all_loaded else known.hook
    found: list[HookImpl] = relay.lightning_redact.get_hookimpls()
    return found


def redacted(text: str, where: str) -> str:
    """Return the text to store instead. `where` tells plugins what the text is, such as `tool.output`."""
    if not text:
        return text
    lowered = text.lower()
    for rule in RULES:
        if any(hint in lowered for hint in rule.hints):
            changed = _substituted(rule, text, lowered)
            if changed is not text:
                text, lowered = changed, changed.lower()
    for implementation in reversed(_redactors()):
        given = {"text": text, "where": where}
        try:
            said = implementation.function(*(given[name] for name in implementation.argnames))
            if not isinstance(said, str | None):
                raise TypeError(f"it returned a {type(said).__qualname__}, not a text")
        except Exception:
            log.exception("the plugin %r failed to redact a text, which is not stored", implementation.plugin_name)
            return f"[left out: the plugin {implementation.plugin_name!r} failed to redact it]"
        text = text if said is None else said
    return text


def _substituted(rule: _Rule, text: str, lowered: str) -> str:
    """Return what `rule.pattern.sub` gives. A long text is searched only where it has a hint.

    One search through megabytes would hold the interpreter's lock for a second, and so stop everything else.
    """
    moved = len(lowered) != len(text)  # a few letters are longer in lower case
    if moved or len(text) <= LONG:
        return rule.pattern.sub(rule.instead, text)
    parts: list[str] = []
    kept = begin = 0  # up to where the text is in `parts`; where a match may begin
    places = dict.fromkeys(rule.hints, -1)
    while places:
        for hint in [hint for hint, place in places.items() if place < begin]:
            if (place := lowered.find(hint, begin)) < 0:
                del places[hint]
            else:
                places[hint] = place
        if not places:
            break
        place = min(places.values())
        tried = (rule.pattern.match(text, at) for at in range(max(begin, place - rule.before), place + 1))
        if (match := next(filter(None, tried), None)) is None:
            begin = place + 1
        else:
            parts += (text[kept : match.start()], match.expand(rule.instead))
            kept = begin = match.end()
    return "".join((*parts, text[kept:])) if parts else text


def redacted_json(value: Json, where: str, depth: int = 0) -> Json:
    """Redact every text in a JSON value. A value under the name of a credential is left out whole."""
    if isinstance(value, str):
        return redacted(value, where)
    if not isinstance(value, (Mapping, Sequence)):
        return value
    if depth == DEEPEST:
        return GONE
    if isinstance(value, Mapping):
        return {
            name: GONE if item and SECRET_NAME.search(name[-LONGEST_NAME:]) else redacted_json(item, where, depth + 1)
            for name, item in value.items()
        }
    return [redacted_json(item, where, depth + 1) for item in value]


def redacted_outcome(outcome: Outcome) -> Outcome:
    """Return an outcome whose error, tool events and states may be stored; the error may also be shown on a terminal."""
    events = tuple(_redacted_event(event) for event in outcome.tool_events)
    states = tuple(replace(state, values=redacted_json(state.values, "state")) for state in outcome.step_states)
    error = printable(redacted(outcome.error, "outcome.error"))
    return replace(outcome, error=error, tool_events=events, step_states=states)


def _redacted_event(event: ToolEvent) -> ToolEvent:
    result, output = event.result, redacted(event.output, "tool.output")
    if result and may_be_redacted(result.encode(errors="replace")):
        told = json.loads(result)
        clean = redacted_json(told, "tool.result")
        result = result if clean == told else json.dumps(clean)
    return replace(
        event,
        result=result,
        incomplete=event.incomplete or result != event.result or (not result and output != event.output),
        arguments=redacted_json(event.arguments, "tool.arguments"),
        output=output,
        error=redacted(event.error, "tool.error"),
    )


def redacted_span(span: Span) -> Span:
    """Return a span whose name, error and attributes may be stored."""
    attributes = redacted_json(span.attributes, "span.attributes")
    assert isinstance(attributes, Mapping), "a mapping stays one"
    return replace(
        span, name=redacted(span.name, "span.name"), error=redacted(span.error, "span.error"), attributes=attributes
    )
