"""The agent that runs a stranger's program: the file as it is, as `python FILE` would, in a rollout's worker process.

The invariant: the program sees its own folder, arguments and input, and no network but this machine; what it prints goes to a
file.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import tempfile
from pathlib import Path

from lightning.testing.network import hold_network
from lightning.types import LLM, Task


def run_program(task: Task, llm: LLM) -> float:
    """Run the program that the task describes; see `tests.official.listing.Program`. Raises what it raises."""
    said: dict = task.input  # type: ignore[assignment]
    path = Path(said["path"])
    with tempfile.TemporaryDirectory(prefix="official-") as scratch, contextlib.ExitStack() as stack:
        os.environ.update(
            {
                name: text.format(base_url=llm.base_url, api_key=llm.api_key)
                for name, text in said["environment"].items()
            }
        )
        # Tracers of several frameworks keep files at home.
        os.environ.update(HOME=scratch, XDG_CACHE_HOME=scratch, XDG_DATA_HOME=scratch, TMPDIR=scratch)
        # What the program starts finds this environment's commands, and its neighbours.
        os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        os.environ["PYTHONPATH"] = os.pathsep.join(said["folders"])
        stack.callback(os.chdir, Path.cwd())
        os.chdir(scratch)
        sys.argv = [str(path), *said["arguments"]]
        sys.path[:0] = [str(path.parent), *said["folders"]]
        sys.stdin = io.StringIO("".join(f"{line}\n" for line in said["input"]))
        # One that keeps an old stream must not find it closed.
        output = Path(said["output"]).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        refused = stack.enter_context(hold_network())
        try:
            if said["module"]:
                runpy.run_module(said["module"], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"the program ended with {end.code!r}") from end
        if refused:
            raise ConnectionError(f"the program wanted to reach {', '.join(sorted(set(refused)))}")
    return 1.0
