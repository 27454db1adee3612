"""The probe after an update: which tokens it asks about, and which differences it lets pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lightning.algorithms.protocol import Batch
from lightning.batch.sample import FloatArray, Sample, TokenSpan
from lightning.config import Config, with_settings
from lightning.policy_server.protocol import Probe
from lightning.trainer.weight_sync import Prober, bound_of

PROMPT, SAMPLED = 70, 60


class Engine:
    """A trainer whose logprobs a test sets."""

    def __init__(self) -> None:
        self.values = np.zeros(2048, np.float32)
        self.policies: list[str] = []

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        self.policies += [sample.policy for sample in samples]
        return [self.values[: len(sample)].copy() for sample in samples]


def row(start: int = PROMPT, sampled: int = SAMPLED, seed: int = 0) -> Sample:
    length = start + sampled
    weights = np.zeros(length, np.float32)
    weights[start:] = 1.0
    old = np.random.default_rng(seed).normal(-1.0, 0.5, length).astype(np.float32)
    old[:start] = np.nan
    versions = np.zeros(length, np.int32)
    spans = (TokenSpan("r", 0, 0, start, length),)
    return Sample(np.arange(length, dtype=np.int32), weights, weights, old, versions, spans)


def prober(dtype: str = "bfloat16", **settings: Any) -> tuple[Prober, Engine]:
    engine = Engine()
    found = {"engine.dtype": dtype, "policy_server.dtype": dtype} | settings
    return Prober(engine, with_settings(Config(), found)), engine  # type: ignore[arg-type]


def batch(*rows: Sample) -> Batch:
    return Batch(rows, ())


def only(made: Prober, attempt: int = 0) -> Probe:
    (probe,) = made.probes(attempt)
    return probe


def ask(made: Prober, served: FloatArray, attempt: int = 0) -> str:
    probe = only(made, attempt)
    verdict = made.judge(probe, served[1 : len(probe.ids)].tolist(), attempt)
    assert verdict is not None
    return verdict.problem


def lengths(made: Prober) -> tuple[int, int]:
    """How many tokens the first and the second try ask about."""
    return len(only(made).ids), len(only(made, 1).ids)


def test_of_rows_with_as_many_sampled_tokens_it_asks_about_the_shortest() -> None:
    made, engine = prober()
    assert made.probes() == []
    made.remember(batch(row(900), row(), row(80, seed=1)), {})
    assert lengths(made) == (PROMPT + SAMPLED - 1, 80 + SAMPLED - 1)
    served = engine.values.copy()
    served[:PROMPT] = 50.0  # the prompt is unlikely, and differs by what it likes
    assert ask(made, served) == ""
    served[PROMPT:] = 50.0
    assert "50 nats in the mean of 59 tokens" in ask(made, served)


def test_it_asks_about_the_row_with_the_most_sampled_tokens_however_many_calls_they_are_of() -> None:
    """The mean of few tokens differs by chance. A few more are not worth a longer probe."""
    made, engine = prober()
    turns = replace(
        row(40, 160), spans=tuple(TokenSpan("r", 0, n, start, start + 10) for n, start in enumerate((40, 90, 150)))
    )
    made.remember(batch(row(40, 15), row(800, 35), turns, row(900, 28)), {})
    assert lengths(made) == (160, 834)
    served = engine.values.copy()
    served[50:90] = 50.0  # between two calls
    assert ask(made, served) == ""
    served[[45, 95, 155]] = 50.0
    assert "5 nats in the mean of 30 tokens" in ask(made, served)
    made.remember(batch(row(40, 1000)), {})
    assert len(only(made).ids) == 40 + 64


def test_the_last_token_of_a_call_that_fills_the_context_is_left_out() -> None:
    made, _ = prober()
    made.recall(range(200), range(56))
    assert len(only(made).ids) == 255, "vLLM samples one more, and refuses what leaves no room for it"


def test_of_a_probe_without_a_token_that_counts_no_gap_is_known() -> None:
    """A server says nothing of the first token, before which nothing stands."""
    made, _ = prober()
    made.recall([5], [])
    assert made.judge(only(made), []) is None


def test_the_second_try_is_of_other_tokens_also_where_one_row_has_many_more() -> None:
    """A row that differs by chance would do so again."""
    made, _ = prober()
    made.remember(batch(row(40, 20), row(40, 60), row(40, 25), row(40, 3)), {})
    assert lengths(made) == (99, 64)


def test_where_no_row_has_enough_sampled_tokens_it_asks_about_one_that_is_long_enough() -> None:
    made, _ = prober()
    bare = replace(row(8, 4), spans=())
    made.remember(batch(row(393, 7), row(11, 1), bare, row(120, 3)), {})
    assert lengths(made) == (122, 399)


def test_few_sampled_tokens_are_compared_with_their_prompt_and_long_prompts_alone() -> None:
    made, engine = prober()
    served = engine.values.copy()
    served[3] = 500.0
    for one, tokens in ((row(30, 5), 33), (row(3000, 50), 1023)):
        made.remember(batch(one), {})
        assert f"of {tokens} tokens" in ask(made, served)


@pytest.mark.parametrize(
    ("dtype", "gap", "outlier", "fails"),
    [
        ("bfloat16", 0.03, 0.4, False),
        ("bfloat16", 0.07, 0.4, True),
        ("bfloat16", 0.01, 0.9, False),  # one token of so few says nothing of one in a thousand
        ("float32", 5e-4, 5e-4, False),
        ("float32", 5e-4, 0.01, True),
    ],
)
def test_the_bound_is_that_of_the_dtypes(dtype: str, gap: float, outlier: float, fails: bool) -> None:
    made, engine = prober(dtype)
    made.remember(batch(row()), {})
    served = engine.values + np.float32(gap)
    served[PROMPT + 3] = outlier
    assert bool(ask(made, served)) is fails


def test_a_number_is_the_bound_of_every_token() -> None:
    made, engine = prober("float32", **{"trainer.max_logprob_gap": 0.5})
    made.remember(batch(row()), {})
    served = engine.values + np.float32(0.4)
    assert ask(made, served) == ""
    served[PROMPT] = 0.6
    assert "0.6 nats" in ask(made, served)


def test_a_model_that_rounds_more_has_its_own_baseline() -> None:
    made, engine = prober()
    fresh = {"mean_logprob_gap": 0.06, "max_logprob_gap": 2.0, "p999_logprob_gap": 1.0}
    made.remember(batch(row()), fresh | {"staleness_max": 1.0})
    assert ask(made, engine.values + np.float32(0.1)), "what was learned since is no baseline"
    made.remember(batch(row()), fresh)
    assert ask(made, engine.values + np.float32(0.1)) == ""
    assert "in the mean" in ask(made, engine.values + np.float32(0.17))


def test_a_step_whose_gap_is_0_is_a_baseline_too() -> None:
    made, engine = prober()
    made.remember(batch(row()), {"mean_logprob_gap": 0.06, "max_logprob_gap": 2.0, "p999_logprob_gap": 1.0})
    made.remember(batch(row()), {"mean_logprob_gap": 0.0, "max_logprob_gap": 0.0, "p999_logprob_gap": 0.0})
    assert "more than 0.0695" in ask(made, engine.values + np.float32(0.1)), "the bound of the dtype alone"


def test_a_step_of_one_token_is_a_baseline_of_its_mean_alone() -> None:
    """It says nothing of one token in a thousand: no `p999_logprob_gap`."""
    made, engine = prober()
    made.remember(batch(row()), {"mean_logprob_gap": 0.03, "max_logprob_gap": 9.0})
    served = engine.values.copy()
    served[PROMPT : PROMPT + 3] = 0.7
    assert ask(made, served) == "0.7 nats or more on 3 of 59 tokens, more than 0.6"


def test_the_few_tokens_of_a_probe_may_differ_by_chance_from_those_of_a_step() -> None:
    """A demonstration's answers have 15 tokens. The mean of so few may be twice that of all, at the same weights."""
    made, engine = prober()
    made.remember(batch(row(sampled=16)), {"mean_logprob_gap": 0.025, "max_logprob_gap": 0.3, "staleness_max": 0.0})
    gaps = np.random.default_rng(0).gamma(0.5, 0.05, (5000, 2048)).astype(np.float32)  # 0.025 in the mean, a long tail
    asked = slice(PROMPT, PROMPT + 15)
    assert sum(float(each[asked].mean()) > 0.05 for each in gaps) > 20, "a bound for many tokens ends good runs"
    assert not any("in the mean" in ask(made, engine.values + each) for each in gaps)
    assert "in the mean" in ask(made, engine.values + np.float32(0.1))


def test_weights_of_the_step_before_are_told_within_the_bound() -> None:
    """The dtype alone makes 0.01 nats; the update moved by 0.04, and the bound is 0.05."""
    made, engine = prober()
    one = row()
    rng = np.random.default_rng(3)
    made.remember(batch(one), {"mean_logprob_gap": 0.01, "max_logprob_gap": 0.1, "staleness_max": 0.0})
    old = np.nan_to_num(one.logprobs)
    engine.values[: len(old)] = old + 0.04 * rng.choice([-1, 1], len(old))
    rounded = 0.01 * rng.choice([-1, 1], len(old)).astype(np.float32)
    assert ask(made, engine.values[: len(old)] + rounded) == ""
    assert "and those of the step before by 0.0" in ask(made, old + rounded)


def test_updates_below_the_samplers_noise_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    made, engine = prober()
    one = row()
    old = np.nan_to_num(one.logprobs)
    metrics = {"mean_logprob_gap": 0.03, "max_logprob_gap": 0.3, "staleness_max": 0.0}
    for moved, told in ((0.03, 0), (0.03, 0), (0.1, 0), (0.03, 0), (0.03, 0), (0.03, 1), (0.1, 1), *[(0.03, 1)] * 3):
        made.remember(batch(one), metrics)
        engine.values[: len(old)] = old + moved
        assert ask(made, engine.values) == ""
        assert caplog.text.count("the last 3 updates changed logprobs by less than the 0.03 nats") == told
    assert "raise engine.lr, or set engine.dtype = 'float32'" in caplog.text


def test_two_servers_with_one_update_are_no_two_updates(caplog: pytest.LogCaptureFixture) -> None:
    made, engine = prober()
    one = row()
    engine.values[: len(one)] = np.nan_to_num(one.logprobs) + 0.03
    made.remember(batch(one), {"mean_logprob_gap": 0.03, "max_logprob_gap": 0.3, "staleness_max": 0.0})
    for told in (0, 0, 1):
        probe = only(made)
        for _ in range(3):
            made.judge(probe, engine.values[1 : len(probe.ids)].tolist())
        assert caplog.text.count("the last 3 updates changed") == told


def test_every_policy_with_tokens_is_probed_with_its_own() -> None:
    made, engine = prober()
    writer, editor = (replace(row(seed=seed), policy=policy) for seed, policy in enumerate(("writer", "editor")))
    made.remember(batch(writer, editor, replace(row(900), policy="writer")), {})
    made.remember(batch(replace(row(40, 30), policy="writer")), {})
    assert [(probe.policy, len(probe.ids)) for probe in made.probes()] == [("editor", 129), ("writer", 69)]
    assert [(probe.policy, len(probe.ids)) for probe in made.probes(1)] == [("editor", 129), ("writer", 69)]
    assert engine.policies[-2:] == ["editor", "writer"], "the trainer computes each with its own policy"
    made.recall(range(20), range(9), "writer")
    editors, writers = made.probes()
    assert len(writers.ids) == 28
    found = made.judge(writers, np.full(27, 50.0).tolist()), made.judge(editors, engine.values[1:129].tolist())
    assert [(verdict.policy, bool(verdict.problem)) for verdict in found if verdict] == [
        ("writer", True),
        ("editor", False),
    ]


def test_a_second_try_is_no_second_update(caplog: pytest.LogCaptureFixture) -> None:
    made, engine = prober()
    one = row()
    engine.values[: len(one)] = np.nan_to_num(one.logprobs) + 0.03
    made.remember(batch(one), {"mean_logprob_gap": 0.03, "max_logprob_gap": 0.3, "staleness_max": 0.0})
    for attempt in (0, 1, 0, 1):
        ask(made, engine.values, attempt)
    assert not caplog.text


def test_a_step_says_by_what_it_exceeds_the_bound() -> None:
    config = with_settings(Config(), {"engine.dtype": "bfloat16", "policy_server.dtype": "bfloat16"})
    metrics = {"mean_logprob_gap": 0.04, "p999_logprob_gap": 0.5, "max_logprob_gap": 5.0, "tokens_compared": 1e4}
    assert bound_of(config).problem_of_step(metrics) == ""
    assert bound_of(config).problem_of_step(metrics | {"p999_logprob_gap": 0.7}) == (
        "0.7 nats or more on 25 of 10000 tokens, more than 0.6"
    )
    many = "0.06 nats in the mean of 10000 tokens, more than 0.0515"
    assert bound_of(config).problem_of_step(metrics | {"mean_logprob_gap": 0.06}) == many
    assert bound_of(config).problem_of_step(metrics | {"mean_logprob_gap": 0.06, "tokens_compared": 100.0}) == ""
    own = with_settings(config, {"trainer.max_logprob_gap": 4.0})
    assert bound_of(own).problem_of_step(metrics) == "5 nats or more on 1 of 10000 tokens, more than 4"
    assert bound_of(config).problem_of_step({"tokens": 12.0, "tokens_compared": 0.0}) == "", "nothing was compared"


def test_a_policy_that_a_step_did_not_train_has_no_update_below_the_noise(caplog: pytest.LogCaptureFixture) -> None:
    made, engine = prober()
    writer, editor = (replace(row(), policy=name) for name in ("writer", "editor"))
    metrics = {"mean_logprob_gap": 0.03, "max_logprob_gap": 0.3, "staleness_max": 0.0}
    old = np.nan_to_num(writer.logprobs)
    engine.values[: len(old)] = old + 0.03
    for steps, own, told in ((1, writer, 0), (4, editor, 1), (2, writer, 1)):
        for _ in range(steps):
            made.remember(batch(own), metrics)
            for probe in made.probes():
                assert made.judge(probe, engine.values[1 : len(probe.ids)].tolist()) is not None
        said = [text for text in caplog.messages if "the last 3 updates" in text]
        assert [text[text.rindex("(") :] for text in said] == ["(of the policy 'editor')"] * told
