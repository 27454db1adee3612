"""Check edits of a prompt template: the fields that the agent fills in must stay, and no other field may appear.

The invariant: code that fills in a template can also fill in an edit of it that `refusal` accepts.
"""

from __future__ import annotations

import re
from collections import Counter
from string import Formatter

_FIELD = re.compile(r"\{(?:[^\W\d]\w*)?(?:[.\[][^{}]*)?(?:![rsa])?(?::[^{}]*)?\}")
"""Matches a field such as `{topic}`, `{user.name}`, `{n:>3}` or `{}`, but not a brace of JSON."""
_TAGGED = re.compile(r"<prompt>(.*?)</prompt>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"^```[\w-]*\n(.*?)\n?^```", re.DOTALL | re.MULTILINE)


def fields(template: str) -> Counter[str] | None:
    """Count each field of a template for `str.format`, as it is written between its braces (`user.name!r:>3`).

    None if the text is not such a template: `str.format` would raise, or its fields are not names (JSON in braces).
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
    """Return the reason why an edited template cannot replace the original; empty if it can.

    Reasons are `empty`, `too_long`, `unchanged`, `lost_placeholder`, `invented_placeholder`, and `not_a_template`: the original
    is a template for `str.format` and the edit is not. Each field of an edit must be a field of the original, character for
    character, so that the optimiser model can neither reach other attributes of the agent's values (`{task.expected}` for
    `{task.input}`) nor choose their format (`{topic:>999999999}`). If the original has no fields, or braces that are not
    fields, it is not known how it is filled in, and only text that looks like a field counts.
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
    """Select the fields without a name, which are filled in by position, so that their number matters."""
    return Counter({field: count for field, count in found.items() if not _name(field)})


def _looks(template: str) -> Counter[str]:
    return Counter(match.group()[1:-1] for match in _FIELD.finditer(template))


def edited_prompt(answer: str) -> str | None:
    """Return the template in an optimiser model's answer: the text between the last pair of `<prompt>` tags, else its only code
    block; None without either."""
    tagged = _TAGGED.findall(answer)
    if tagged:
        return str(tagged[-1]).strip("\n").strip()
    fenced = _FENCED.findall(answer)
    return str(fenced[0]).strip() if len(fenced) == 1 else None
