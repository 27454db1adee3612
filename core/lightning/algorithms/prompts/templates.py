"""What a prompt template demands of its edits: the fields that the agent fills in must survive, and no other may appear.

The invariant: a template that passes `refusal` can be filled in by the code that fills in the one it was made from.
"""

from __future__ import annotations

import re
from collections import Counter
from string import Formatter

_FIELD = re.compile(r"\{([^\W\d]\w*)?(?:[.\[][^{}]*)?(?:![rsa])?(?::[^{}]*)?\}")
"""A field such as `{topic}`, `{user.name}`, `{n:>3}` or `{}`; a brace before JSON is none."""
_TAGGED = re.compile(r"<prompt>(.*?)</prompt>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"^```[\w-]*\n(.*?)\n?^```", re.DOTALL | re.MULTILINE)


def fields(template: str) -> Counter[str] | None:
    """How often each field of a template for `str.format` occurs, by name; unnamed ones are counted under the empty name.

    None when it is no such template: `str.format` would raise, or its fields are no names (JSON in braces).
    """
    found: Counter[str] = Counter()
    try:
        for _, name, spec, _ in Formatter().parse(template):
            if name is not None:
                found[re.split(r"[.\[]", name, maxsplit=1)[0]] += 1
            for inner in Formatter().parse(spec or ""):
                if inner[1] is not None:
                    found[inner[1]] += 1
    except ValueError:
        return None
    return found if all(not name or name.isidentifier() or name.isdecimal() for name in found) else None


def refusal(original: str, edited: str, *, longest: int) -> str:
    """Why an edited template cannot stand in for the original; empty when it can.

    `empty`, `too_long`, `unchanged`, `lost_placeholder`, `invented_placeholder`, or `not_a_template` when the original is
    filled in by `str.format` and the edit would make that raise. Where the original has no braces, or braces that are no
    fields, nothing is known of how it is filled in: then only what looks like a field counts.
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
    if before.keys() - after.keys() or after[""] < before[""]:
        return "lost_placeholder"
    if after.keys() - before.keys() or after[""] > before[""]:
        return "invented_placeholder"
    return ""


def _looks(template: str) -> Counter[str]:
    return Counter(match.group(1) or "" for match in _FIELD.finditer(template))


def edited_prompt(answer: str) -> str | None:
    """The template in an optimiser model's answer: between `<prompt>` tags (the last pair), or in its only code block; None
    when there is neither."""
    tagged = _TAGGED.findall(answer)
    if tagged:
        return str(tagged[-1]).strip("\n").strip()
    fenced = _FENCED.findall(answer)
    return str(fenced[0]).strip() if len(fenced) == 1 else None
