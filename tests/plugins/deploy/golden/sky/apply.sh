#!/bin/sh
# Launches the training as a managed job; `sky jobs logs` follows it, `sky jobs cancel` ends it.
set -eu
cd "$(dirname "$0")/../.."
: "${SEARCH_KEY:?set it: it is given to the job as a secret}"
: "${PGPASSWORD:?set it: it is given to the job as a secret}"
wheels=deploy/wheels
if ! ls "$wheels"/lightning-VERSION-*.whl >/dev/null 2>&1; then
    python3 -m pip download --quiet --no-deps --dest "$wheels" lightning==VERSION
fi
sky jobs launch --yes --name my-agent --secret SEARCH_KEY --secret PGPASSWORD deploy/sky/task.yaml
