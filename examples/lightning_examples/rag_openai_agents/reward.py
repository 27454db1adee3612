"""The reward of an answer: 0.9 times its token F1, and 0.1 for the form that the instructions ask for.

The invariant: it is in [0, 1], and 1 exactly for an answer in the form whose normalised tokens are those of an accepted one.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

FORM = re.compile(r"\s*Answer:[ \t]*(\S[^\n]*?)\s*")
"""The whole reply is one line, `Answer: ...`."""


def reward(reply: str, answers: Iterable[str]) -> float:
    """Score a reply against the accepted answers; the best match counts. Without the form, all of the reply is the answer."""
    form = FORM.fullmatch(reply)
    said = form[1] if form else reply
    return 0.9 * max((f1(said, answer) for answer in answers), default=0.0) + 0.1 * (form is not None)


def f1(said: str, answer: str) -> float:
    """Harmonic mean of precision and recall over normalised tokens, as SQuAD measures it (arXiv 1606.05250)."""
    ours, theirs = normalize(said), normalize(answer)
    common = sum((Counter(ours) & Counter(theirs)).values())
    # SQuAD 2.0: where either is nothing, only nothing is right.
    return 2 * common / (len(ours) + len(theirs)) if ours and theirs else float(ours == theirs)


def normalize(text: str) -> list[str]:
    """Lower case, no punctuation, no articles, split at white space."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()
