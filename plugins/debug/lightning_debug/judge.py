"""A model as a judge, which scores the rollouts of a group side by side by a rubric.

The invariant: equal transcripts under equal settings get equal scores in every process that shares the file of judgements. If
the judge gives no usable scores for a group, none are made up; if it does not answer, an error is raised. An answer is durable
before it is used, and the first answer to a question stays, so that an audit finds the scores that training used. Its key is a
hash of the whole question. The file keeps scores and the beginnings of unusable answers, but neither texts of rollouts nor
credentials.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from lightning.asyncio_utils import outside_of_loops, while_wanted
from lightning.batch import Advantages, Group, Trajectory
from lightning.config import refuse_class, refuses_unknown
from lightning.credit import Credit, GroupAdvantage
from lightning.errors import ConfigError, DataError, JudgeError, LightningError
from lightning.plugins import plugins
from lightning.types import Status
from lightning_prompts.chat_model import ChatClient, ChatModel
from lightning_record.exchanges import parent_of

from lightning_debug.judge_prompt import (
    NonsenseError,
    agreement,
    ask_again,
    order_of,
    question,
    read_scores,
    rollout_items,
    written,
)
from lightning_debug.transcript import REDACTED, Transcript, transcript_of


@dataclass(frozen=True, slots=True)
class Answer:
    """A judge's answer: scores in the order in which rollouts were shown, and the text that they stand in (shortened). None and
    the beginning of the text if it is unusable."""

    scores: tuple[float, ...] | None
    said: str = ""


TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS judgements (key TEXT PRIMARY KEY, scores TEXT, said TEXT NOT NULL) WITHOUT ROWID"
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judge's result for a group. `scores` has one score from 0 to 1 for each rollout, the mean over the usable samples; None
    if no sample was usable. `agreement` is the share of pairs of rollouts that two samples order alike; None with fewer than
    two usable samples or two different rollouts. `nonsense` are the beginnings of the unusable answers."""

    scores: tuple[float, ...] | None
    agreement: float | None
    nonsense: tuple[str, ...] = ()


NOTHING: Final = Judgement((), None)
"""The judgement of a group without rollouts."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """A kept answer of a judge as it concerns one rollout: its `score` from 0 to 1, the whole `text` about the group (empty if
    only scores were kept), and the `number` under which the text speaks of the rollout, of `count`."""

    score: float
    text: str
    number: int
    count: int


class Judgements:
    """The SQLite file that keeps a judge's answers, by default in the user's cache folder; it is created if missing. The
    methods raise `ConfigError` if the file cannot be used."""

    def __init__(self, file: str | Path | None = None) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.file = Path(file).expanduser() if file else cache / "lightning" / "judgements.db"

    def get(self, key: str, *, make: bool = True) -> Answer | None:
        """Return the kept answer to the question with this key; None if there is none. Without `make` the file is only read,
        and must be there."""
        with self._opened(make=make) as database:
            row = database.execute("SELECT scores, said FROM judgements WHERE key = ?", (key,)).fetchone()
        return None if row is None else Answer(None if row[0] is None else tuple(json.loads(row[0])), row[1])

    def keep(self, key: str, answer: Answer) -> Answer:
        """Keep an answer unless the question has one already, for example from another process; return the kept one."""
        scores = None if answer.scores is None else json.dumps(answer.scores)
        said = answer.said.encode("utf-8", "replace").decode()
        with self._opened() as database, database:
            database.execute("INSERT OR IGNORE INTO judgements VALUES (?, ?, ?)", (key, scores, said))
        return self.get(key) or answer

    @contextmanager
    def _opened(self, *, make: bool = True) -> Iterator[sqlite3.Connection]:
        try:
            if make:
                self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = f"{self.file.absolute().as_uri()}?mode={'rwc' if make else 'ro'}"
            with closing(sqlite3.connect(name, timeout=60.0, uri=True)) as database:
                if make:
                    database.execute("PRAGMA synchronous = FULL")
                    database.execute(TABLE)
                yield database
        except (OSError, sqlite3.Error, ValueError) as error:
            raise ConfigError(
                f"the judge's answers cannot be kept in {self.file}: {error}. Give the judge another file (cache=...), or "
                "move this one away: what it held is asked again"
            ) from error


logger = logging.getLogger(__name__)

SAID: Final = 200
"""Most characters of an unusable answer that are kept and shown."""
REASONS: Final = 8_000
"""Most characters of a usable answer that are kept: the last ones, which end with the scores."""
CURE: Final = "Try another model or a plainer rubric, or give it more attempts"


@dataclass(frozen=True, slots=True)
class JudgeModel(ChatModel):
    """The client's settings for the judging model. `max_tokens` bounds an answer; None sends no bound."""

    max_tokens: int | None = None

    role: ClassVar[str] = "the judge"
    failure: ClassVar[type[LightningError]] = JudgeError

    def settings(self) -> dict[str, object]:
        """Return the request's settings; the bound is sent as `max_completion_tokens`, the name that newer models need."""
        bound = {} if self.max_tokens is None else {"max_completion_tokens": self.max_tokens}
        return ChatModel.settings(self) | bound


@refuses_unknown
@dataclass(frozen=True, slots=True)
class Judge:
    """An LLM judge as a credit function: `LightningRL(credit=Judge("The answer is correct and short.", model="..."))`.

    The `model` at `base_url` (before `/chat/completions`) is shown all rollouts of a group side by side and scores each from 0
    to 1 relative to the others, by the `rubric`. A rollout's return is its agent's reward plus `weight` times its score; the
    `credit` function given here compares returns and spreads them over calls. A rollout that the policy failed is not shown and
    keeps its reward. `api_key_env` names the environment variable with the key, which is never kept.

    A group is judged `samples` times, each time in another order, and its scores are the means. A `temperature` of None is not
    sent. `max_tokens` bounds an answer, reasoning included: without it a small model may never stop. A request without an
    answer within `timeout` seconds, or with an answer without usable scores, is tried up to `attempts` times; after that, the
    group keeps its agents' rewards alone, with a warning. `concurrency` requests are made at once. About `longest` characters
    of a rollout are shown; its middle is left out.

    Answers are kept in the file `cache` (by default `~/.cache/lightning/judgements.db`), and nothing is asked twice: a resumed
    run and an audit take them from there. Raises `JudgeError` if the model does not answer, `ConfigError` if the judge or its
    cache cannot be used, `DataError` if the texts of a rollout are not recorded.
    """

    rubric: str = ""
    _: KW_ONLY
    model: str = ""
    base_url: str = "https://api.openai.com/v1"
    api_key_env: str = "OPENAI_API_KEY"
    weight: float = 1.0
    samples: int = 1
    temperature: float | None = None
    max_tokens: int | None = None
    timeout: float = 120.0
    attempts: int = 4
    concurrency: int = 8
    longest: int = 20_000
    credit: str | Credit = "identical"
    cache: str | Path | None = None

    rewards: ClassVar[bool] = True
    """Marks a credit function that adds rewards of its own."""

    def __post_init__(self) -> None:
        if isinstance(self.cache, Path):
            object.__setattr__(self, "cache", str(self.cache))  # a run's record keeps it as text
        refuse_class(self.credit, "the credit")
        if bool(self.rubric.strip()) != bool(self.model):
            raise ConfigError('a judge needs both a rubric and a model: lightning.Judge("What is good", model="...")')
        if not math.isfinite(self.weight) or self.samples < 1 or self.longest < 1:
            raise ConfigError("a judge needs a finite weight, and samples and longest of at least 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError("a judge's max_tokens are at least 1, or None")
        if self.model:
            self._endpoint()

    @property
    def head(self) -> str:
        """Empty, because a judge compares rollouts and needs no values of states. Raises `ConfigError` without a rubric, or
        if its `credit` function needs a head."""
        if not self.model:
            raise ConfigError(
                'the credit "judge" has no rubric: give LightningRL(credit=lightning.Judge("What is good", model="..."))'
            )
        if head := getattr(self._spread(), "head", None):
            raise ConfigError(
                f"a judge compares the rollouts of a group, and the head {head!r} does not: give it another credit"
            )
        return ""

    def __call__(self, group: Group, advantage: GroupAdvantage) -> Advantages:
        """Judge a group and return the advantages that the credit gives its judged rollouts."""
        assert not self.head
        judged = [member for member in group.trajectories if _is_judged(member)]
        (judgement,) = self.judge([[_transcript(member) for member in judged]]) if judged else (NOTHING,)
        if judgement.nonsense:
            self._warn(group, judgement)
        scores = dict(zip((member.rollout.id for member in judged), judgement.scores or (), strict=False))
        members = tuple(
            replace(
                member, rollout=replace(member.rollout, reward=member.reward + self.weight * scores[member.rollout.id])
            )
            if member.rollout.id in scores
            else member
            for member in group.trajectories
        )
        return self._spread()(Group(group.id, members), advantage)

    def prefetch(self, groups: Sequence[Group]) -> None:
        """Judge all groups of a step at the same time; later calls with these groups take the kept answers."""
        assert not self.head
        found = [[_transcript(member) for member in group.trajectories if _is_judged(member)] for group in groups]
        self.judge([transcripts for transcripts in found if transcripts])

    def judge(self, groups: Sequence[Sequence[Transcript]]) -> list[Judgement]:
        """Judge groups of transcripts and return one judgement for each, with scores in the order of its transcripts."""
        return outside_of_loops(lambda: asyncio.run(while_wanted(self._judge_all(groups))))

    def opinions(self, group: Group) -> dict[str, tuple[Opinion, ...]]:
        """Return what the kept answers say of each judged rollout of a group, by its id, in the order of the samples. Nothing
        is asked. Raises `DataError` if the texts of a rollout are not recorded, `ConfigError` if the file cannot be used."""
        judged = [member for member in group.trajectories if _is_judged(member)]
        kept = Judgements(self.cache)
        if not judged or not kept.file.is_file():
            return {}
        asked = self._question([_transcript(member) for member in judged])
        found: dict[str, list[Opinion]] = {member.rollout.id: [] for member in judged}
        for sample in range(self.samples):
            order, _, key = asked.asked(sample)
            answer = kept.get(key, make=False)
            if answer is None or answer.scores is None:
                continue
            for member, text in zip(judged, asked.places, strict=True):
                number = order.index(asked.texts.index(text))
                found[member.rollout.id].append(Opinion(answer.scores[number], answer.said, number + 1, len(order)))
        return {name: tuple(opinions) for name, opinions in found.items() if opinions}

    async def _judge_all(self, groups: Sequence[Sequence[Transcript]]) -> list[Judgement]:
        client, kept = ChatClient(self._endpoint()), Judgements(self.cache)
        try:
            return list(await asyncio.gather(*(self._judge(client, kept, group) for group in groups)))
        except JudgeError as error:
            raise JudgeError(
                f"{error}. Nothing is trained without its scores. Start it, or change the judge (a request that is too long: a "
                "smaller longest; an answer without end: max_tokens; a slow one: a longer timeout), and resume: what it has "
                f"answered is kept in {kept.file}"
            ) from error

    async def _judge(self, client: ChatClient, kept: Judgements, group: Sequence[Transcript]) -> Judgement:
        asked = self._question(group)
        texts, places = asked.texts, asked.places
        answers = await asyncio.gather(*(self._sample(client, kept, asked, sample) for sample in range(self.samples)))
        usable = [answer.scores for answer in answers if answer.scores is not None]
        nonsense = tuple(answer.said for answer in answers if answer.scores is None)
        if not usable:
            return Judgement(None, None, nonsense)
        means = dict(zip(texts, np.mean(np.array(usable, dtype=np.float64), axis=0).tolist(), strict=True))
        return Judgement(tuple(means[text] for text in places), agreement(usable), nonsense)

    def _question(self, group: Sequence[Transcript]) -> _Question:
        shown: dict[str, list[dict[str, Any]]] = {}  # equal rollouts are shown once, and have one score
        places = []
        for seen in group:
            items = rollout_items(seen, self.longest)
            text = written(items)
            shown.setdefault(text, items)
            places.append(text)
        task = {"input": group[0].task.input, "expected": group[0].task.expected}
        return _Question(self, task, shown, tuple(sorted(shown)), tuple(places))

    async def _sample(self, client: ChatClient, kept: Judgements, asked: _Question, sample: int) -> Answer:
        """Ask for one sample of scores, or take the kept answer; the scores are in the order of the question's texts."""
        order, messages, key = asked.asked(sample)
        answer = kept.get(key) or kept.keep(key, await self._ask(client, messages, len(order)))
        if answer.scores is None:
            return answer
        scores = dict(zip(order, answer.scores, strict=True))
        return Answer(tuple(scores[place] for place in range(len(order))))

    async def _ask(self, client: ChatClient, messages: Any, count: int) -> Answer:
        asked, said = messages, ""
        for _ in range(self.attempts):
            said = await client.ask(asked)
            try:
                return Answer(read_scores(said, count), said[-REASONS:])
            except NonsenseError as problem:
                asked = ask_again(messages, said, str(problem))
        return Answer(None, said[:SAID])

    def _warn(self, group: Group, judgement: Judgement) -> None:
        left = "the other samples count" if judgement.scores else "its agents' own rewards count alone"
        logger.warning(
            "the judge %r gave no usable scores for group %s in %d of %d samples, so %s. It said: %r. %s",
            self.model,
            group.id,
            len(judgement.nonsense),
            self.samples,
            left,
            judgement.nonsense[0],
            CURE,
        )

    def _endpoint(self) -> JudgeModel:
        return JudgeModel(
            self.model,
            self.base_url,
            self.api_key_env,
            self.temperature,
            self.timeout,
            self.attempts,
            self.concurrency,
            self.max_tokens,
        )

    def _spread(self) -> Credit:
        return plugins().credit(self.credit)


@dataclass(frozen=True, slots=True)
class _Question:
    """The question about a group: what is `shown` of each different rollout, by its text, these `texts` in order, and the text
    of each of the group's rollouts (`places`)."""

    judge: Judge
    task: Mapping[str, object]
    shown: Mapping[str, Sequence[Mapping[str, Any]]]
    texts: tuple[str, ...]
    places: tuple[str, ...]

    def asked(self, sample: int) -> tuple[list[int], Sequence[Mapping[str, str]], str]:
        """Return the order in which a sample shows the texts, its messages, and the key under which its answer is kept."""
        judge, order = self.judge, order_of(self.texts, sample)
        messages = question(judge.rubric, self.task, [self.shown[self.texts[place]] for place in order])
        asked = [judge.base_url, judge.model, judge.temperature, judge.attempts, sample, messages]
        if judge.max_tokens is not None:
            asked.append(judge.max_tokens)
        return order, messages, hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _is_judged(member: Trajectory) -> bool:
    return member.rollout.status is not Status.FAILED


def _transcript(member: Trajectory) -> Transcript:
    """Return the transcript of a rollout. Raises `DataError` if its texts are not recorded."""
    calls = sorted((*member.transitions, *member.refused, *member.lost), key=lambda call: (call.seq, call.choice))
    seen = transcript_of(member.rollout, calls, member.tool_events, parent_of(member))
    if seen.missing not in ("", REDACTED):
        raise DataError(
            f"the judge cannot read rollout {member.rollout.id}: {seen.missing}. Texts are recorded while "
            "gateway.record_requests is true, up to 4 MiB for each request"
        )
    return seen
