"""The retrieval example without its framework: questions, corpus, reward, retrievers, MuSiQue's format."""

from __future__ import annotations

import json
import pickle
import string
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import MissingExtraError
from lightning.errors import DataError
from lightning_examples.rag_openai_agents import CORPUS, world
from lightning_examples.rag_openai_agents.musique import read_musique
from lightning_examples.rag_openai_agents.retriever import Bm25, Document, Embeddings, bm25_of, load_corpus
from lightning_examples.rag_openai_agents.reward import f1, normalize, reward
from lightning_examples.rag_openai_agents.tasks import describe, is_held_out, shipped_world, take, tasks, val_tasks
from lightning_examples.rag_openai_agents.world import make_world

MUSIQUE = Path(__file__).with_name("rag_musique.jsonl")
seeds = st.integers(0, 2**32)
texts = st.text(string.ascii_letters + string.punctuation + " \n", max_size=30)


def test_the_demo_never_trains_on_held_out_people() -> None:
    train, held_out = tasks(4000, 0), val_tasks(200)  # as many as `lightning demo` asks for
    assert len({task.input for task in train}) == 4000
    assert len({task.input for task in held_out}) == 200
    assert not {task.metadata["person"] for task in train} & {task.metadata["person"] for task in held_out}


@settings(deadline=None, max_examples=20)
@given(seeds)
def test_who_is_held_out_does_not_depend_on_the_seed(seed: int) -> None:
    assert not any(is_held_out(str(task.metadata["person"])) for task in tasks(20, seed))
    assert all(is_held_out(str(task.metadata["person"])) for task in take(make_world(seed), 20, "x", held_out=True))


def test_held_out_tasks_are_always_the_same_and_a_seed_gives_its_own() -> None:
    assert val_tasks(50) == val_tasks(500)[:50]
    assert tasks(20, 1) == tasks(20, 1)
    assert tasks(20, 1) != tasks(20, 2)


def test_some_questions_need_one_document_and_most_need_two() -> None:
    hops = [len(task.metadata["relations"]) for task in tasks(1000, 0)]
    assert set(hops) == {1, 2}
    assert 0.15 < hops.count(1) / len(hops) < 0.35


@settings(deadline=None, max_examples=8)
@given(seeds)
def test_searching_what_was_found_leads_to_the_answer(seed: int) -> None:
    facts = make_world(seed)
    retriever = Bm25(list(facts.documents()))
    for task in take(facts, 10, "test", held_out=False):
        first, *second = task.metadata["relations"]
        query, answer = str(task.metadata["person"]), task.expected[0]
        assert query in str(task.input)
        assert answer not in str(task.input)
        for relation in (first, *second):
            (document,) = retriever.search(query, 1)
            assert document.title == query
            query = {**facts.people, **facts.companies, **facts.cities}[query][relation]
            assert query in document.text
        assert query == answer


def test_the_shipped_corpus_is_what_its_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["world", str(tmp_path / "corpus.jsonl")])
    world.main()
    assert (tmp_path / "corpus.jsonl").read_bytes() == CORPUS.read_bytes()
    assert load_corpus(CORPUS) == list(shipped_world().documents())


def test_another_seed_is_another_world_of_the_same_names() -> None:
    one, other = make_world(1), make_world(2)
    assert set(one.cities) == set(other.cities)
    assert one.companies != other.companies


def test_a_task_is_described_in_words() -> None:
    (task,) = tasks(1, 0)
    assert describe(task) == f"{task.input} (answer: {task.expected[0]})"


# --- the reward -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Answer: Kira Holt", 1.0),
        ("Answer: the kira, HOLT.\n", 1.0),
        ("Kira Holt", 0.9),
        ("Answer: Kira", 0.1 + 0.9 * 2 / 3),
        ("Answer: Kira Vance", 0.1 + 0.9 / 2),
        ("Answer: Porto", 0.1),
        ("Porto", 0.0),
        ("Answer:", 0.0),
        ("", 0.0),
        ("I looked it up.\nAnswer: Kira Holt", 0.9 * 2 * 2 / 9),
        ("Answer: Kira Holt\nAnswer: Porto", 0.9 * 2 * 2 / 7),
    ],
)
def test_the_reward_is_f1_and_form(reply: str, expected: float) -> None:
    assert reward(reply, ["Kira Holt"]) == pytest.approx(expected)


def test_the_best_of_several_answers_counts() -> None:
    assert reward("Answer: NYC", ["New York City", "NYC"]) == 1.0
    assert reward("Answer: NYC", []) == pytest.approx(0.1)


@given(texts, texts)
def test_f1_is_symmetric_and_within_bounds(one: str, other: str) -> None:
    assert f1(one, other) == f1(other, one)
    assert 0.0 <= f1(one, other) <= 1.0
    assert (f1(one, other) == 1.0) == (sorted(normalize(one)) == sorted(normalize(other)))


@given(texts, texts)
def test_a_wrong_word_more_never_pays(said: str, answer: str) -> None:
    assert f1(f"{said} 7", answer) <= f1(said, answer)


@given(st.one_of(texts, texts.map("Answer: {}".format)), st.lists(texts, max_size=3))
def test_the_reward_is_whole_only_for_an_accepted_answer_in_form(reply: str, answers: list[str]) -> None:
    value = reward(reply, answers)
    assert 0.0 <= value <= 1.0
    head, _, said = reply.strip().partition("Answer:")
    in_form = not head and bool(said.strip()) and "\n" not in reply.strip()
    right = any(sorted(normalize(said)) == sorted(normalize(answer)) for answer in answers)
    assert (value == 1.0) == (in_form and right)


@given(texts)
def test_normalising_twice_is_normalising_once(text: str) -> None:
    assert normalize(" ".join(normalize(text))) == normalize(text)


# --- retrievers -------------------------------------------------------------------------------------------------------

DOCUMENTS = [Document("Porto", "Porto lies on the Alder."), Document("Graz", "Graz lies on the Dove.")]


def test_bm25_finds_what_shares_words_with_the_query_best_first() -> None:
    retriever = Bm25(DOCUMENTS)
    assert retriever.search("What is Graz?", 5) == [DOCUMENTS[1]]
    assert retriever.search("lies Porto", 5) == DOCUMENTS
    assert retriever.search("lies Porto", 1) == DOCUMENTS[:1]
    for nothing in ("", "the", "Narva", "?"):
        assert retriever.search(nothing, 2) == []


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=40), st.integers(1, 4))
def test_bm25_takes_any_query(query: str, k: int) -> None:
    assert len(bm25_of(CORPUS).search(query, k)) <= k


def test_a_corpus_travels_as_its_path_and_is_read_once() -> None:
    retriever = bm25_of(CORPUS)
    data = pickle.dumps(retriever)
    assert len(data) < 500
    assert pickle.loads(data) is retriever
    assert pickle.loads(pickle.dumps(Bm25(DOCUMENTS))).search("Graz", 1) == DOCUMENTS[1:]


def test_what_cannot_be_searched_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="nothing to search in"):
        Bm25([])
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"title": "a", "text": "b"}\n{"title": "a"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 2"):
        load_corpus(path)
    for module, build in (("bm25s", Bm25), ("sentence_transformers", Embeddings)):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=module):
            build(DOCUMENTS)


def test_embeddings_find_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    class SentenceTransformer:
        def __init__(self, model: str) -> None:
            self.model = model

        def encode(self, texts: list[str], *, normalize_embeddings: bool) -> np.ndarray:
            assert normalize_embeddings
            return np.array([[text.count("o"), 1.0] for text in texts])

    library = SimpleNamespace(SentenceTransformer=SentenceTransformer)
    monkeypatch.setitem(sys.modules, "sentence_transformers", library)
    retriever = Embeddings(DOCUMENTS, "some-model")
    assert retriever.search("oooo", 1) == DOCUMENTS[:1]
    assert len(retriever.search("x", 2)) == 2


# --- MuSiQue ----------------------------------------------------------------------------------------------------------


def test_musique_gives_answerable_questions_and_all_paragraphs_once(tmp_path: Path) -> None:
    corpus = tmp_path / "runs" / "corpus.jsonl"
    first, second = read_musique(MUSIQUE, corpus)
    assert first.id == "2hop__482757_12019"
    assert first.input == "When was the institute that owned The Collegian founded?"
    assert first.expected == ["1960", "year 1960"]
    assert first.metadata == {"hops": 2, "supporting": ["The Collegian (Houston Baptist University)", "Houston"]}
    assert second.expected == ["Nicolas Chauvin"]
    titles = [document.title for document in load_corpus(corpus)]
    assert titles == ["The Collegian (Houston Baptist University)", "Houston", "Lyon", "Chauvinism"]
    found = Bm25(load_corpus(corpus)).search("Which university owned The Collegian?", 1)
    assert found[0].title == titles[0]


@pytest.mark.parametrize("line", ["not json", "[]", '{"id": "1"}', json.dumps({"paragraphs": [{"title": "a"}]})])
def test_what_is_not_musique_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(MUSIQUE.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"questions\.jsonl, line 4: not a MuSiQue question"):
        read_musique(path, tmp_path / "corpus.jsonl")
