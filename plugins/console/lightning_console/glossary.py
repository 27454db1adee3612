"""The words of reinforcement learning on the console's pages: a sentence or two for each, for a reader who knows the agent.

The invariant: each word is explained here and nowhere else. The pages' hints and `docs/glossary.md` are made from this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

WORDS: Final = """
80 % of the gain
    How soon a run reached four fifths of what it gained in the end.
advantage = advantages
    How much better a rollout (or one of its calls) did than the others of its group. Training makes the tokens of a
    positive advantage more likely, and those of a negative one less likely. 0 teaches nothing.
agent
    Your program: it gets a task, calls the model and tools, and gives an answer. Training changes the model, not
    the program.
alarm = alarms
    A sign in a run's figures that training goes wrong, with the steps and rollouts that show it.
alias = aliases
    A name, such as production, for one version of a prompt or of weights. The name can be moved to another version.
attempt
    One try of a rollout. A rollout that failed for a reason outside the agent, such as a lost machine, is tried
    again.
branch = branches; branch of
    A rollout that begins as another rollout did, its parent, and is sampled anew from one of the parent's calls on.
call = calls; calls of a rollout
    One request of the agent to the model, with the model's answer.
clip fraction = clipped; clip; clipped and masked
    The share of tokens that a step did not push any further, because their probability had already changed as much
    as one step may change it. A few percent are usual; a high share means that steps are too large.
credit
    The rule that spreads a rollout's advantage over its calls. The simplest rule, identical, gives every call the
    same.
deviation = spread
    How far the values lie from their mean, on average (the standard deviation). 0: all are equal.
entropy
    How undecided the model is at each token, in nats. Near 0 the model nearly always writes the same; then rollouts
    of a group are alike and nothing is learned. A sudden rise means that the model begins to write at random.
evaluation = evaluations; held-out evaluations
    Rollouts of held-out tasks that only measure the policy. Nothing is trained on them.
expected
    The right answer that a task brings along. The grader gets it; the agent does not.
failed rollout = failed rollouts; in rollouts that failed
    A rollout that ended with an error before the grader gave a reward. A rollout with the reward 0 did not fail: the
    grader looked at it.
fault
    Whose error ended a rollout: agent (your program), policy (the model, for example an answer that never ends) or
    infrastructure (a machine or the network). A rollout that the training loop wanted no more is cancelled.
gap = mean |Δ logprob|; trainer to sampler
    How far two programs disagree about the probability of the same sampled tokens: the server that sampled them and
    the trainer that learns from them. It should be close to 0; a large gap means that training corrects the wrong
    probabilities.
grader
    The code that looks at a finished rollout and gives its reward. It is part of your agent, or a judge.
gradient norm = norm of the gradient
    How strongly a step wants to change the weights. A sudden jump often comes before a run breaks.
group = groups; in its group
    The rollouts of one task in one step. They are compared with each other: that is where advantages come from.
group that taught = taught; groups that taught; mixed groups
    A group whose rollouts have different returns (a mixed group), so that training has something to prefer.
group that taught nothing = groups with equal rewards; in groups that taught nothing; groups that taught nothing
    A group whose rollouts all did equally well or equally badly: every advantage is 0, and the step learns nothing
    from the group.
held-out = held-out tasks; held-out reward
    Tasks that are never trained on. Only the reward on them shows whether the agent got better at the work and not
    only at the training tasks.
how it ended
    Whether a rollout ended with an error or without one. How good its result was is said by the reward alone.
interval = ± (95 %)
    The range that the true mean lies in, 95 times of 100. The more tasks, the narrower. Two results whose intervals
    overlap widely may be equally good.
judge
    A language model that scores rollouts by a rubric, in place of a grader in code or besides one.
KL = kl divergence
    How far the trained model has moved away from another one, usually the model it began as. 0: not at all.
learning rate = engine.lr
    How large the change of the weights is in each step. Too large breaks the model, too small learns nothing.
length
    How many tokens the model wrote. A reward that a longer answer raises is often a mistake of the grader.
logprob
    The logarithm of the probability with which the model wrote a token. 0 is certain; −2.3 is one in ten.
mask = masked
    Leaving tokens out of a step, because the sampler and the trainer disagree about them too much.
policy
    The model that is trained: what decides the agent's next words. Its weights change in every step.
policy version
    The state of the weights after so many steps: version 3 was made by step 3, version 0 is the model as it began.
proved
    The console computed the step's training rows again from the stored rollouts and got exactly what was recorded.
push = pushed
    How hard training moved the probability of a token in a step: advantage times weight. All tokens of a call
    usually get the same push.
rank correlation
    Whether two quantities rise together: +1 always, 0 unrelated, −1 one falls whenever the other rises (Spearman's
    rho).
ratio = sampler/trainer ratio; ratio − 1
    How much more likely the model being trained would write a token than the model that sampled it. 1: equally
    likely.
return = mean return
    What a rollout is compared by: its reward, with the rewards given at single calls and the rules of the
    algorithm. Of a state: the mean over the rollouts that came through it.
reward = rewards; mean reward; last reward; reward of the last step
    The number that the grader gives for a rollout: the larger, the better. What is rewarded is what is learned.
reward with failures = failed as 0
    The mean reward in which a failed rollout counts as 0. The mean over the others alone rises also when the hard
    tasks begin to fail.
rollout = rollouts
    The agent on one task, once, from the task to the reward.
sampling
    Having the model write: at each token it picks by chance among likely ones, so that the same task ends
    differently each time.
staleness = age of the trained tokens
    By how many steps the policy has changed since the tokens that it learns from were sampled. 0: they are its own.
step = steps
    One update of the weights, from a batch of groups. Steps are counted from 1.
task
    One problem for the agent, for example a question with its right answer.
token = tokens; answer tokens; prompt tokens
    A piece of text, a word or a part of one. The model reads and writes tokens.
tool run
    One execution of a tool that the model asked for. A tool run can fail although the rollout goes on.
trained tokens = trained
    The tokens that a step learned from: written by the model itself, in calls with an advantage that is not 0. With a
    bonus for entropy, or a KL penalty, the other calls count too.
useful tokens
    The share of all sampled tokens that were trained on. The rest was sampled for nothing.
void branch = void
    A branch that did not repeat the calls of its parent exactly, and therefore says nothing.
weight
    The share of a token in its step. The weights of a step add up as the algorithm says, so that long rollouts do
    not count more than they should.
weights
    The numbers that make up the model. Training changes them.
"""
"""Each word in a line of its own, with ` = ` before its other names on pages; below it, indented, its explanation."""


@dataclass(frozen=True, slots=True)
class Term:
    """A word with its explanation. `also` are other names for the same thing: of columns, figures, curves and titles."""

    name: str
    text: str
    also: tuple[str, ...] = ()


def _terms() -> Iterator[Term]:
    name, also, text = "", "", list[str]()
    for line in [*WORDS.strip().splitlines(), ""]:
        if line.startswith(" "):
            text.append(line.strip())
            continue
        if name:
            yield Term(name, " ".join(text), tuple(filter(None, also.split("; "))))
        (name, _, also), text = line.partition(" = "), []


GLOSSARY: Final = tuple(_terms())
_TEXTS: Final[Mapping[str, str]] = {name.casefold(): term.text for term in GLOSSARY for name in (term.name, *term.also)}


def explained(name: str, hint: str = "") -> str:
    """Return the hint for something that a page calls `name`: the page's own hint, then the explanation of the word if the
    glossary has it."""
    return "\n\n".join(filter(None, (hint, _TEXTS.get(name.strip().casefold(), ""))))


def with_hints(value: object) -> None:
    """Fill the hints in a block's JSON: of every object with a `name` and a `hint`, such as a figure, a column or a measure."""
    if isinstance(value, dict):
        if isinstance(value.get("name"), str) and isinstance(value.get("hint"), str):
            value["hint"] = explained(value["name"], value["hint"])
            return
        for item in value.values():
            with_hints(item)
    elif isinstance(value, list | tuple):
        for item in value:
            with_hints(item)


def lines() -> Iterator[str]:
    """Yield the glossary as Markdown, in alphabetical order: a heading and a paragraph for each word."""
    for term in GLOSSARY:
        yield f"### {term.name}\n\n{term.text}\n"
