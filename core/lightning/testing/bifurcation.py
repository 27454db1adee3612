"""Bifurcation tasks: in each, a few calls decide and the others only make noise, in one of the ways that agents know.

The invariant: every task has a single difficulty, which its `about` names, so that a score on it says something.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from lightning.testing.decisions import Action, ActionOutcome, Decision, DecisionTask


@cache
def bifurcation_tasks() -> Mapping[str, DecisionTask]:
    """All of them, by name."""
    made = (
        early(), late(), long_chain(), two_agents(), consult(), wasteful_tool(), late_bill(), recombining(), retry()
    )  # fmt: skip
    return MappingProxyType({task.name: task for task in made})


def early(noise: int = 4) -> DecisionTask:
    """The first call decides, then come calls that change nothing."""
    states = {"choose": Decision((_go(0.5, "right-1"), _go(0.5, "wrong-1")))}
    states |= _chain("right-", noise, 0.9) | _chain("wrong-", noise, 0.1)
    return DecisionTask("early", states, about="the first call decides, the others are noise")


def late(noise: int = 4) -> DecisionTask:
    """Calls that change nothing, then one that decides."""
    states = {f"noise-{place}": _noise(f"noise-{place + 1}" if place < noise else "choose") for place in _to(noise)}
    states["choose"] = Decision((_end(0.5, 0.9), _end(0.5, 0.1)))
    return DecisionTask("late", states, about="the last call decides, the others are noise")


def long_chain(calls: int = 12, decisive: int = 6) -> DecisionTask:
    """One bifurcation in the middle of many calls."""
    states = {
        f"noise-{place}": _noise(f"noise-{place + 1}" if place + 1 < decisive else "choose")
        for place in _to(decisive - 1)
    }
    states["choose"] = Decision((_go(0.5, "right-1"), _go(0.5, "wrong-1")))
    states |= _chain("right-", calls - decisive, 0.9) | _chain("wrong-", calls - decisive, 0.1)
    return DecisionTask("long-chain", states, about=f"call {decisive} of {calls} decides, the others are noise")


def two_agents(turns: int = 2) -> DecisionTask:
    """A planner whose first call decides, a writer who changes nothing, and a judge who is not trained."""
    states = {"plan": Decision((_go(0.5, "right-1"), _go(0.5, "wrong-1")), "planner")}
    for side, success in (("right-", 0.9), ("wrong-", 0.1)):
        for turn in _to(turns):
            states[f"{side}{turn}"] = _noise(f"{side}{turn + 1}" if turn < turns else f"{side}judge", agent="writer")
        states[f"{side}judge"] = Decision((_end(1.0, success),), "judge", trained=False)
    return DecisionTask(
        "two-agents", states, about="the planner decides, the writer is noise, the judge is not trained"
    )


def consult() -> DecisionTask:
    """A router that does the work alone, or asks an expert, whose own decision matters less than being asked."""
    states = {
        "route": Decision((_go(0.5, "expert"), _end(0.5, 0.1)), "router"),
        "expert": Decision((_end(0.5, 0.95), _end(0.5, 0.65)), "expert"),
    }
    return DecisionTask("consult", states, about="an agent that is called only where things go well anyway")


def wasteful_tool(calls: int = 4) -> DecisionTask:
    """A call of a useless tool costs a quarter at once; success is a coin toss."""
    states = {}
    for place in _to(calls):
        after = f"work-{place + 1}" if place < calls else ""
        ends = tuple(ActionOutcome(0.5, reward=reward) for reward in (1.0, 0.0))
        waste = tuple(ActionOutcome(item.probability, "", item.reward, -0.25) for item in ends)
        states[f"work-{place}"] = Decision(
            (
                Action(0.5, (ActionOutcome(state=after),) if after else ends),
                Action(0.5, (ActionOutcome(state=after, step_reward=-0.25),) if after else waste),
            )
        )
    return DecisionTask("wasteful-tool", states, about="each call may cost a step reward at once; the outcome is luck")


def late_bill(noise: int = 2) -> DecisionTask:
    """The first call decides what a later call has to pay, which cannot help it."""
    states = {"choose": Decision((_go(0.5, "careful-1"), _go(0.5, "careless-1")))}
    for side, cost in (("careful-", 0.0), ("careless-", -0.5)):
        states |= {
            f"{side}{place}": _noise(f"{side}{place + 1}" if place < noise else f"{side}bill") for place in _to(noise)
        }
        pays = tuple(ActionOutcome(0.5, reward=reward, step_reward=cost) for reward in (1.0, 0.0))
        states[f"{side}bill"] = Decision((Action(0.5, pays), Action(0.5, pays)))
    return DecisionTask("late-bill", states, about="the first call decides on a step reward that a later call gets")


def recombining(stages: int = 3, memory: bool = False) -> DecisionTask:
    """Luck puts the rollout into one of three places, which differ by 0.4; then each call earns 0.2 or nothing.

    Prompts show the place and the stage, so rollouts meet whatever they did before. With `memory` they show that too, and
    fewer stand in the same state.
    """
    order = ("low", "mid", "high")
    states = {"start": _noise(*(f"{name}-1" for name in order))}
    for place, name in enumerate(order):
        for stage in _to(stages):
            after = f"{name}-{stage + 1}" if stage < stages else ""
            reward = 0.0 if after else 0.4 * place
            states[f"{name}-{stage}"] = Decision(
                tuple(Action(0.5, (ActionOutcome(1.0, after, reward, earned),)) for earned in (0.2, 0.0))
            )
    return DecisionTask("recombining", states, memory, "luck decides most, then rollouts meet in the same few states")


def retry() -> DecisionTask:
    """Try with care, try in haste, or give up; a failed try costs a little and leads back to the same prompt."""
    states = {
        "read": _noise("easy", "hard"),
        "easy": _try("easy", 0.8, 0.5),
        "hard": _try("hard", 0.4, 0.1),
    }
    return DecisionTask("retry", states, False, "a failed call costs a step reward and leads back to the same state")


def _try(name: str, careful: float, hasty: float) -> Decision:
    tries = tuple(
        Action(0.4, (ActionOutcome(success, reward=1.0), ActionOutcome(1.0 - success, name, step_reward=-0.1)))
        for success in (careful, hasty)
    )
    return Decision((*tries, Action(0.2, (ActionOutcome(),))))


def _go(probability: float, *states: str) -> Action:
    """An action that leads to one of the states, each as likely."""
    return Action(probability, tuple(ActionOutcome(1.0 / len(states), state) for state in states))


def _end(probability: float, success: float) -> Action:
    """An action that ends the rollout with the reward 1 or 0."""
    return Action(probability, (ActionOutcome(success, reward=1.0), ActionOutcome(1.0 - success)))


def _noise(*states: str, agent: str = "agent") -> Decision:
    """Two actions that make no difference."""
    return Decision((_go(0.5, *states), _go(0.5, *states)), agent)


def _chain(prefix: str, calls: int, success: float) -> dict[str, Decision]:
    """Calls that change nothing, up to an end with this probability of success."""
    chain = {f"{prefix}{place}": _noise(f"{prefix}{place + 1}") for place in _to(calls - 1)}
    return {**chain, f"{prefix}{calls}": Decision((_end(0.5, success), _end(0.5, success)))}


def _to(count: int) -> range:
    return range(1, count + 1)
