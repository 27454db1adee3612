"""What a prompt template demands of its edits: the fields that the agent fills in must survive, and no other may appear.

The invariant: a template that passes `refusal` can be filled in by the code that fills in the one it was made from.
"""

from __future__ import annotations

import re
from collections import Counter
from string import Formatter

_FIELD = re.compile(r"\{(?:[^\W\d]\w*)?(?:[.\[][^{}]*)?(?:![rsa])?(?::[^{}]*)?\}")
"""A field such as `{topic}`, `{user.name}`, `{n:>3}` or `{}`; a brace before JSON is none."""
_TAGGED = re.compile(r"<prompt>(.*?)</prompt>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"^```[\w-]*\n(.*?)\n?^```", re.DOTALL | re.MULTILINE)


def fields(template: str) -> Counter[str] | None:
    """How often each field of a template for `str.format` occurs, as it is written between its braces (`user.name!r:>3`).

    None when it is no such template: `str.format` would raise, or its fields are no names (JSON in braces).
    """
    found: Counter[str] = Counter()
    names: set[str] = set()
    try:
        for _, name, spec, conversion in Formatter().parse(template):
            if name is not None:
                found[name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")] += 1
                names.add(_name(name))
            names |= {_name(inner) for _, inner, _, _ in Formatter().parse(spec or "") if inner is not None}
    except ValueError:
        return None
    return found if all(not name or name.isidentifier() or name.isdecimal() for name in names) else None


def refusal(original: str, edited: str, *, longest: int) -> str:
    """Why an edited template cannot stand in for the original; empty when it can.

    `empty`, `too_long`, `unchanged`, `lost_placeholder`, `invented_placeholder`, or `not_a_template` when the original is
    filled in by `str.format` and the edit would make that raise. A field of an edit is one of the original, character for
    character: who writes prompts must not reach another attribute of what the agent fills in (`{task.expected}` for
    `{task.input}`), nor choose how it is formatted (`{topic:>999999999}`). Where the original has no braces, or braces that
    are no fields, nothing is known of how it is filled in: then only what looks like a field counts.
    """
    if not edited.strip():
        return "empty"
    if len(edited) > longest:
        return "too_long"
    if edited.strip() == original.strip():
        return "unchanged"
    before, after = fields(original), fields(edited)
    if before and after is None:
        return "not_a_template"
    if not before or after is None:
        before, after = _looks(original), _looks(edited)
    if {_name(field) for field in before} - {_name(field) for field in after} or _unnamed(before) - _unnamed(after):
        return "lost_placeholder"
    if after.keys() - before.keys() or _unnamed(after) - _unnamed(before):
        return "invented_placeholder"
    return ""


def _name(field: str) -> str:
    return re.split(r"[.\[!:]", field, maxsplit=1)[0]


def _unnamed(found: Counter[str]) -> Counter[str]:
    """Those that are filled in by their place, so that their number counts."""
    return Counter({field: count for field, count in found.items() if not _name(field)})


def _looks(template: str) -> Counter[str]:
    return Counter(match.group()[1:-1] for match in _FIELD.finditer(template))


def edited_prompt(answer: str) -> str | None:
    """The template in an optimiser model's answer: between `<prompt>` tags (the last pair), or in its only code block; None
    when there is neither."""
    tagged = _TAGGED.findall(answer)
    if tagged:
        return str(tagged[-1]).strip("\n").strip()
    fenced = _FENCED.findall(answer)
    return str(fenced[0]).strip() if len(fenced) == 1 else None
