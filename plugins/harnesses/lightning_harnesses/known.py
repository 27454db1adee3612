"""How known programs ask a model for things beside their work: titles, topics, probes, and summaries of a long conversation.

The invariant: a pattern is a text that the program sends with such a request and with no other: the beginning of a system
prompt, or that of the last text of the user. Where a program changes a text, its calls are trained as any others until the
pattern is added here. All knowledge of single programs is in `PATTERNS`. The requests of Claude Code 2.1.197 and opencode
1.18.33 were recorded, and are the fixtures of the tests; the other texts are those of the programs' published sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_harnesses.requests import Asked


@dataclass(frozen=True, slots=True)
class Pattern:
    """A request of one `program`, which the rule `rule` matches. All conditions hold that are given: `system` is in the system
    prompt; the last text of the user begins with `last`, and `within` is in it; the limit of tokens is `max_tokens`."""

    rule: str
    program: str
    system: str = ""
    last: str = ""
    within: str = ""
    max_tokens: int | None = None

    def matches(self, asked: Asked) -> bool:
        """Whether a request is this one."""
        return (
            asked.last.startswith(self.last)
            and (self.max_tokens is None or asked.max_tokens == self.max_tokens)
            and self.system in asked.system
            and self.within in asked.last
        )


PATTERNS: Final = (
    Pattern("title", "Claude Code", "Generate a concise, sentence-case title (3-7 words)"),
    Pattern("title", "Claude Code", "Summarize this coding conversation in under 50 characters."),
    Pattern("title", "opencode", "You are a title generator. You output ONLY a thread title."),
    Pattern(
        "title", "Crush", "You will generate a short title based on the first message a user begins a conversation with"
    ),
    Pattern("topic", "Claude Code", "Analyze if this message indicates a new conversation topic."),
    Pattern(
        "summary", "opencode", "Summarize what was done in this conversation. Write like a pull request description."
    ),
    Pattern("recap", "Claude Code", last="The user stepped away and is coming back. Recap in under"),
    Pattern("quota", "Claude Code", last="quota", max_tokens=1),
    Pattern("warmup", "Claude Code", "Claude Code", last="Warmup"),
    Pattern(
        "compaction",
        "Claude Code",
        last="CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.",
        within="Your task is to create a detailed summary of ",
    ),
    Pattern("compaction", "Claude Code", last="Your task is to create a detailed summary of the conversation"),
    Pattern(
        "compaction",
        "opencode",
        "You are a context summarization agent. You are given a conversation between a user and",
    ),
    Pattern("compaction", "opencode", "You are a helpful AI assistant tasked with summarizing conversations."),
    Pattern("compaction", "Codex", last="You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary"),
    Pattern(
        "compaction", "OpenHands", last="You are maintaining a context-aware state summary for an interactive agent."
    ),
    Pattern(
        "compaction",
        "Gemini CLI",
        "You are the component that summarizes internal chat history into a given structure.",
    ),
)
"""The known requests, of which the first that matches counts."""

KNOWN: Final[Mapping[str, tuple[Pattern, ...]]] = {
    name: tuple(each for each in PATTERNS if each.rule == name)
    for name in dict.fromkeys(each.rule for each in PATTERNS)
}
"""The patterns of each known rule."""

TRAINED_IF_ACCEPTED: Final = frozenset({"compaction"})
"""The known rules whose accepted calls are trained: what the policy writes there decides how the agent goes on."""
