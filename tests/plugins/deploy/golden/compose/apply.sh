#!/bin/sh
# Builds the images and starts everything; run it again after a change. Stop with: docker compose --file ... down
set -eu
cd "$(dirname "$0")"
sh ../docker/build.sh
docker compose --file compose.yaml up --detach
