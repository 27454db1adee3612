"""The end of a demonstration: numbers, a picture, and one rollout in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning.errors import MissingExtraError
from lightning.store.protocol import Store
from lightning.trainer.collect import all_rollouts
from lightning.trainer.plan import VAL
from lightning.trainer.summary import PHASES, Summary
from lightning.types import CallStatus, Rollout, Task


@dataclass(frozen=True, slots=True)
class Story:
    """One held-out task, and what the agent said before and after training."""

    task: str
    before: str
    before_reward: float
    after: str
    after_reward: float


async def tell_story(
    store: Store, run: str, last_step: int, describe: Callable[[Task], str], decode: Callable[[list[int]], str]
) -> Story | None:
    """The first held-out task whose reward rose most between the first and the last evaluation."""
    first = {rollout.task.id: rollout for rollout in await all_rollouts(store, run, split=VAL, step=0)}
    last = {rollout.task.id: rollout for rollout in await all_rollouts(store, run, split=VAL, step=last_step)}
    pairs = [
        (after.reward - before.reward, before, after)
        for task, before in first.items()
        if (after := last.get(task)) and before.reward is not None and after.reward is not None
    ]
    if not pairs or last_step == 0:
        return None
    _, before, after = max(pairs, key=lambda pair: pair[0])
    return Story(
        describe(before.task),
        await _words(store, before, decode),
        before.reward or 0.0,
        await _words(store, after, decode),
        after.reward or 0.0,
    )


async def _words(store: Store, rollout: Rollout, decode: Callable[[list[int]], str]) -> str:
    calls = [call for call in await store.transitions(rollout.id, rollout.attempt) if call.status is CallStatus.OK]
    if not calls:
        return "(no call)"
    return decode([*calls[-1].prompt_ids, *calls[-1].response_ids])


def chat_text(text: str) -> str:
    """ChatML as a person would read it: one `role: words` block for each turn."""
    turns = [turn for turn in text.split("<|im_start|>") if turn.strip()]
    lines = []
    for turn in turns:
        role, _, words = turn.replace("<|im_end|>", "").partition("\n")
        lines.append(f"{role.strip()}: {' '.join(words.split())}")
    return "\n".join(lines)


def write_report(summary: Summary, folder: Path) -> Path:
    """`report.json`: the summary as it is."""
    file = folder / "report.json"
    file.write_text(json.dumps(summary.to_json(), indent=2) + "\n")
    return file


def draw_rewards(summary: Summary, title: str, file: Path) -> None:
    """`reward.png`: training reward by step and the held-out evaluations. Raises `MissingExtraError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plot", "matplotlib") from error
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        range(1, len(summary.rewards) + 1), summary.rewards, alpha=0.6, label="training rollouts (mean of a step)"
    )
    axes.plot(
        [result.step for result in summary.evaluations if result.reward is not None],
        [result.reward for result in summary.evaluations if result.reward is not None],
        marker="o",
        linewidth=2,
        label="held-out tasks",
    )
    axes.set(xlabel="optimizer steps", ylabel="reward", title=title, ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)


def show_summary(summary: Summary, title: str, console: Console) -> None:
    """Before and after, and where the time went."""
    results = Table(title=title)
    results.add_column("held-out tasks")
    results.add_column("before", justify="right")
    results.add_column("after", justify="right")
    results.add_column("gain", justify="right")
    before, after = summary.before, summary.after
    results.add_row(
        str(summary.evaluations[0].rollouts if summary.evaluations else 0),
        "-" if before is None else f"{before:.3f}",
        "-" if after is None else f"{after:.3f}",
        "-" if before is None or after is None else f"[bold]{after - before:+.3f}",
    )
    console.print(results)
    console.print(
        f"{summary.steps} steps, {summary.rollouts} rollouts ({summary.failed} failed), "
        f"{summary.trained_tokens} trained tokens, of which {summary.drift_tokens} are not exactly what vLLM sampled; "
        f"largest logprob gap between vLLM and the trainer {_gap(summary.max_logprob_gap)}",
        highlight=False,
        soft_wrap=True,
    )
    total = sum(summary.time.values()) or 1.0
    times = Table("where the time went", "seconds", "share")
    for phase in PHASES:
        seconds = summary.time.get(phase, 0.0)
        times.add_row(phase, f"{seconds:.1f}", f"{seconds / total:.0%}")
    times.add_row("total", f"{sum(summary.time.values()):.1f}", "")
    console.print(times)


def _gap(gap: float | None) -> str:
    return "unknown: no step was without stale tokens" if gap is None else f"{gap:.1e}"


def show_story(story: Story, console: Console) -> None:
    """One rollout before and after."""
    console.print(f"\n[bold]One held-out task:[/bold] {escape(story.task)}", highlight=False, soft_wrap=True)
    for when, words, reward in (
        ("before training", story.before, story.before_reward),
        ("after training", story.after, story.after_reward),
    ):
        console.print(f"\n[bold]{when}[/bold] (reward {reward:g})", highlight=False, soft_wrap=True)
        console.print(escape(words), highlight=False, soft_wrap=True)
