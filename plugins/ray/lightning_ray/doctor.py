"""The check of Ray in `lightning doctor`: its version, and a cluster's nodes and GPUs.

The invariant: a cluster is attached to only if the user named it, and in a separate process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from lightning.cli.check import Check, ProbeError, probe
from lightning.installation import install_command, version_of

from lightning_ray.connection import check_listening

RAY_SECONDS = 60
"""Time limit in seconds for attaching to a cluster."""
RAY_PORT = 6379
REFUSED = "InvalidAuthToken"
"""Ray's error when the cluster needs a token that this process has not sent."""
AUTHENTICATE = (
    "copy ~/.ray/auth_token of the cluster's head to this machine, and set RAY_AUTH_MODE=token here and for training"
)


def check_ray(tried: str | None) -> Iterator[Check]:
    """Check Ray, and the cluster that `--try ray=ADDRESS` or RAY_ADDRESS names."""
    address = tried or os.environ.get("RAY_ADDRESS", "") or ("" if tried is None else "auto")
    found = version_of("ray")
    if found is None:
        if address:
            yield Check("ray", "missing", f"{address} cannot be attached to", install_command("ray"))
        return
    if not address:
        detail = f"{found}; no cluster was named (--try ray=ADDRESS, RAY_ADDRESS): training starts Ray on this machine"
        yield Check("ray", "ok", detail)
        return
    start = f"ray start --head --port={RAY_PORT} on one machine, ray start --address=HOST:{RAY_PORT} on the others"
    try:
        check_listening(address)
        answer = probe("lightning_ray.probe", address, seconds=RAY_SECONDS)
    except (OSError, ProbeError) as error:
        if isinstance(error, ProbeError) and REFUSED in error.log:
            yield Check("ray", "broken", f"the cluster at {address} wants a token", AUTHENTICATE)
        else:
            yield Check("ray", "broken", f"no cluster answers at {address}: {error}", start)
        return
    gpus = answer["gpus"]
    assert isinstance(gpus, list), "the probe counts them by node"
    detail = f"{answer['version']} at {address}: {len(gpus)} nodes, GPUs on them: {', '.join(map(str, gpus))}"
    if any(gpus):
        yield Check("ray", "ok", detail)
    else:
        yield Check("ray", "low", detail, f"workers need GPUs: {start}, with --num-gpus=N where Ray does not find them")
