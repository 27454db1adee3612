"""The glossary: each word has one explanation, and pages take their hints from it."""

from __future__ import annotations

from collections import Counter

from lightning_console.blocks import Column, Fact, Facts, Measure, Reason, Table, TokenStrip
from lightning_console.glossary import GLOSSARY, explained


def test_each_name_is_explained_once_in_one_to_three_sentences() -> None:
    names = Counter(name.casefold() for term in GLOSSARY for name in (term.name, *term.also))
    assert {name: count for name, count in names.items() if count > 1} == {}
    assert {term.name: term.text for term in GLOSSARY if not 1 <= term.text.count(". ") + 1 <= 3} == {}
    assert all(term.text.endswith(".") for term in GLOSSARY)
    assert [term.name for term in GLOSSARY] == sorted((term.name for term in GLOSSARY), key=str.casefold)


def test_pages_explain_their_words() -> None:
    advantage = explained("advantage")
    assert "better" in advantage
    facts = Facts([Fact("Advantages", "1", hint="of this call"), Fact("seconds", "2")], title="Entropy").to_json()
    assert [fact["hint"] for fact in facts["value"]["facts"]] == [f"of this call\n\n{advantage}", ""]
    assert facts["hint"] == explained("entropy") != ""
    assert Table([Column("advantage")], []).to_json()["value"]["columns"][0]["hint"] == advantage
    strip = TokenStrip(["a"], 0, [Measure("advantage", [1.0])], [Reason("weight", "1")]).to_json()["value"]
    assert strip["measures"][0]["hint"] == advantage
    assert strip["why"][0]["hint"] == explained("weight") != ""
