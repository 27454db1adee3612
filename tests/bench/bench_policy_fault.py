"""What training should make of rollouts that the policy itself failed: each setting of `trainer.policy_fault`, several seeds.

The task has a limit of turns: the agent of the demonstration `math` may call the model three times, and raises the Agents SDK's
`MaxTurnsExceeded` when it has no answer then. Printed are the share of held-out tasks that it solves (those that failed count
as not solved) and the share that failed by the limit, before and after training. A run whose result is in the folder is
not made again, so that the benchmark may be interrupted.

    python tests/bench/bench_policy_fault.py [--out FOLDER] [--seeds 3] [--steps 15]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path

SETTINGS = ("0", "mask", "exclude")
TURNS = 3
HELD_OUT = 200


async def agent(task, llm):  # type: ignore[no-untyped-def]
    """The demonstration's agent with fewer turns."""
    from agents.exceptions import MaxTurnsExceeded
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.messages import TextMessage
    from lightning_examples.calculator import calculate
    from lightning_examples.math_autogen.agent import MAX_TOKENS, NAME, SYSTEM, client_of, grade

    solver = AssistantAgent(
        NAME,
        model_client=client_of(llm, MAX_TOKENS),
        tools=[calculate],
        system_message=SYSTEM,
        max_tool_iterations=TURNS,
    )
    last = (await solver.run(task=str(task.input))).messages[-1]
    if not isinstance(last, TextMessage):
        raise MaxTurnsExceeded(f"no answer after {TURNS} turns")
    return grade(last.to_text(), task)


def train(policy_fault: str, seed: int, steps: int, folder: Path) -> None:
    """One run; its result goes to `folder`."""
    from lightning import Trainer
    from lightning.config import Config, with_settings
    from lightning.plugins import plugins
    from lightning.store.pages import each_rollout
    from lightning.types import Fault

    demo = plugins().demo("math")()
    value: object = policy_fault if policy_fault.isalpha() else float(policy_fault)
    settings = {**demo.settings, "trainer.seed": seed, "trainer.steps": steps, "trainer.policy_fault": value}
    settings["runner.adapters"] = ("autogen", "openai-agents")
    trainer = Trainer(demo.model, demo.algorithm(), out=folder / "run", config=with_settings(Config(), settings))
    summary = trainer.fit(agent, demo.tasks(4096, seed), demo.val_tasks(HELD_OUT))

    async def held_out() -> list[dict[str, float]]:
        store = trainer.open_store()
        await store.open()
        found: dict[int, list[tuple[float, bool]]] = {}
        async for rollout in each_rollout(store, summary.run, split="val"):
            found.setdefault(rollout.step, []).append((rollout.reward or 0.0, rollout.fault is Fault.POLICY))
        await store.close()
        return [
            {
                "solved": statistics.fmean(reward for reward, _ in each),
                "limit": statistics.fmean(over for _, over in each),
            }
            for _, each in sorted(found.items())
        ]

    first, *_, last = asyncio.run(held_out())
    result = {"before": first, "after": last, "seconds": sum(summary.time.values()), "failed": summary.failed}
    (folder / "result.json").write_text(json.dumps(result))


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/policy-fault"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--one", nargs=2, metavar=("SETTING", "SEED"), help="one run alone, in this process")
    asked = parser.parse_args()
    if asked.one:
        setting, seed = asked.one
        train(setting, int(seed), asked.steps, asked.out / f"{setting}-{seed}")
        return
    rows: dict[str, list[dict]] = {setting: [] for setting in SETTINGS}
    for seed in range(asked.seeds):
        for setting in SETTINGS:
            folder = asked.out / f"{setting}-{seed}"
            if not (folder / "result.json").exists():
                folder.mkdir(parents=True, exist_ok=True)
                command = [
                    sys.executable,
                    __file__,
                    "--out",
                    str(asked.out),
                    "--steps",
                    str(asked.steps),
                    "--one",
                    setting,
                    str(seed),
                ]
                with (folder / "log").open("w") as log:
                    subprocess.run(command, check=True, stdout=log, stderr=log)
            rows[setting].append(json.loads((folder / "result.json").read_text()))
            sys.stdout.write(f"{setting} seed {seed}: {rows[setting][-1]}\n")
            sys.stdout.flush()
    for setting, found in rows.items():
        said = [f"{setting:8}"]
        for when in ("before", "after"):
            for what in ("solved", "limit"):
                said.append(f"{what} {when} " + " ".join(f"{each[when][what]:.3f}" for each in found))
        sys.stdout.write("  ".join(said) + "\n")


if __name__ == "__main__":
    main()
