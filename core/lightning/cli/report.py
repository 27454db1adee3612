"""The end of a demonstration: numbers, a picture, and one rollout in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from lightning.errors import MissingExtraError
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.terminal import Terminal
from lightning.trainer.gains import LEVEL, gain_of
from lightning.trainer.plan import VAL
from lightning.trainer.summary import PHASES, Evaluation, Summary, said
from lightning.trainer.training_data import all_rollouts
from lightning.types import Rollout, Task


@dataclass(frozen=True, slots=True)
class Story:
    """One held-out task, and what the agent said before and after training."""

    task: str
    before: str
    before_value: float
    after: str
    after_value: float
    measure: str = "reward"


async def tell_story(
    store: Store,
    run: str,
    last_step: int,
    describe: Callable[[Task], str],
    decode: Callable[[list[int]], str],
    measure: str = "reward",
) -> Story | None:
    """Return the story of the held-out task whose `measure` rose most between the first and the last evaluation (of several the
    first); None if no task can be compared."""
    first = {rollout.task.id: rollout for rollout in await all_rollouts(store, run, split=VAL, step=0)}
    last = {rollout.task.id: rollout for rollout in await all_rollouts(store, run, split=VAL, step=last_step)}
    pairs = [
        (was, now, before, after)
        for task, before in first.items()
        if (after := last.get(task))
        and (was := _value(before, measure)) is not None
        and (now := _value(after, measure)) is not None
    ]
    if not pairs or last_step == 0:
        return None
    was, now, before, after = max(pairs, key=lambda pair: pair[1] - pair[0])
    return Story(
        describe(before.task),
        await _words(store, before, decode),
        was,
        await _words(store, after, decode),
        now,
        measure,
    )


def _value(rollout: Rollout, measure: str) -> float | None:
    return rollout.reward if measure == "reward" else rollout.rewards.get(measure)


async def _words(store: Store, rollout: Rollout, decode: Callable[[list[int]], str]) -> str:
    calls = [call for call in await store.transitions(rollout.id, rollout.attempt) if call.status.answered]
    if not calls:
        return "(no call)"
    return decode([*calls[-1].prompt_ids, *calls[-1].response_ids])


def chat_text(text: str) -> str:
    """Format ChatML for people: one `role: words` line for each turn."""
    turns = [turn for turn in text.split("<|im_start|>") if turn.strip()]
    lines = []
    for turn in turns:
        role, _, words = turn.replace("<|im_end|>", "").partition("\n")
        lines.append(f"{role.strip()}: {' '.join(words.split())}")
    return "\n".join(lines)


def write_report(summary: Summary, folder: Path) -> Path:
    """Write the summary to `report.json` in a folder, and return the file."""
    file = folder / "report.json"
    file.write_text(json.dumps(summary.to_json(), indent=2) + "\n")
    return file


def draw_rewards(summary: Summary, title: str, file: Path, measure: str = "reward") -> None:
    """Draw `reward.png`: `measure` in training by step, and in the held-out evaluations. Raises `MissingExtraError` without
    matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plot", "matplotlib") from error
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    trained = [
        (step, value)
        for step, value in enumerate(
            summary.rewards if measure == "reward" else summary.named_rewards.get(measure, ()), start=1
        )
        if value is not None
    ]
    axes.plot(*_columns(trained), alpha=0.6, label="training rollouts (mean of a step)")
    axes.plot(
        *_columns(
            [(result.step, mean) for result in summary.evaluations if (mean := result.mean(measure)) is not None]
        ),
        marker="o",
        linewidth=2,
        label="held-out tasks",
    )
    if any(result.failed for result in summary.evaluations):
        points = [(result.step, result.mean_with_failures(measure)) for result in summary.evaluations]
        held_out = [(step, mean) for step, mean in points if mean is not None]
        axes.plot(*_columns(held_out), linestyle="--", label="held-out tasks, if failures count as 0")
    axes.set(xlabel="optimizer steps", ylabel=measure, title=title, ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def show_summary(summary: Summary, title: str, console: Terminal, measure: str = "reward") -> None:
    """Print `measure` before and after training with the interval of its gain, and where the time went."""
    ended = summary.evaluations
    if ended:
        console.print(_results(summary, title, measure))
    else:
        console.print(f"{escape(title)}: no held-out tasks were given, so how much was gained is not known (--val)")
    gain = gain_of(ended, measure, with_failures=any(result.failed for result in ended))
    if gain is not None and gain.doubt:
        console.print(f"[yellow]{counted(gain.tasks, 'held-out task')}: {gain.doubt}", highlight=False, soft_wrap=True)
    if summary.idle_steps:
        same = ": before and after are the same model" if summary.idle_steps == summary.steps else ""
        console.print(
            f"[yellow]{summary.idle_steps} of {summary.steps} steps trained nothing and left the weights as they "
            f"were{same}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"{counted(summary.steps, 'step')}: {counted(summary.rollouts, 'training rollout')} ({summary.failed} failed) and "
        f"{counted(summary.held_out_rollouts, 'held-out rollout')} in {counted(len(ended), 'evaluation')}; "
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


def _results(summary: Summary, title: str, measure: str) -> Table:
    """Make the table of the held-out means: over the rollouts that were scored and, if some failed, with the failed as 0."""
    results = Table(title=title)
    results.add_column("held-out tasks")
    for name in (f"{measure} before", "after", "gain", f"{LEVEL:.0%} interval"):
        results.add_column(name, justify="right")
    ended = summary.evaluations
    results.add_row(str(ended[0].rollouts), *_cells(ended, measure, with_failures=False))
    if any(result.failed for result in ended):
        results.add_row("if failures count as 0", *_cells(ended, measure, with_failures=True))
    return results


def _cells(ended: Sequence[Evaluation], measure: str, *, with_failures: bool) -> tuple[str, str, str, str]:
    """Format the first mean, the last one, the gain, and its interval."""
    means = [each.mean_with_failures(measure) if with_failures else each.mean(measure) for each in ended]
    gain = gain_of(ended, measure, with_failures=with_failures)
    return (
        said(means[0]),
        said(means[-1] if len(means) > 1 else None),
        "-" if gain is None else f"[bold]{gain.change:+.3f}",
        "-" if gain is None else escape(gain.said_interval()),
    )


def _gap(gap: float | None) -> str:
    return "unknown: no token was compared, or only those of older weights" if gap is None else f"{gap:.1e}"


def show_story(story: Story, console: Terminal) -> None:
    """Print one rollout before and after training, without the turns of the prompt that both begin with."""
    told = [story.before.splitlines(), story.after.splitlines()]
    same = next(
        (line for line, (one, other) in enumerate(zip(*told, strict=False)) if one != other), min(map(len, told))
    )
    console.print(f"\n[bold]One held-out task:[/bold] {escape(story.task)}", highlight=False, soft_wrap=True)
    for when, lines, value in zip(("before", "after"), told, (story.before_value, story.after_value), strict=True):
        console.print(
            f"\n[bold]{when} training[/bold] ({story.measure} {value:g}; after the same {counted(same, 'turn')})",
            highlight=False,
            soft_wrap=True,
        )
        console.print(escape("\n".join(lines[same:])), highlight=False, soft_wrap=True)
