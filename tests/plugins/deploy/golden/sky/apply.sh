#!/bin/sh
# Launches the training as a managed job; `sky jobs logs` follows it, `sky jobs cancel` ends it.
set -eu
cd "$(dirname "$0")/../.."
: "${PGPASSWORD:?set it: it is given to the job as a secret}"
: "${SEARCH_KEY:?set it: it is given to the job as a secret}"
# Always anew: another version may be installed by now.
wheels=deploy/wheels
rm -f "$wheels"/*.whl
cp dist/lightning.whl "$wheels"
sky jobs launch --yes --name my-agent --secret PGPASSWORD --secret SEARCH_KEY deploy/sky/task.yaml
