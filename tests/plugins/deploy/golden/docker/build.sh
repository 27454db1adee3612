#!/bin/sh
# Builds the three images from the project's folder, and pushes them: sh deploy/docker/build.sh [PUSH]
set -eu
cd "$(dirname "$0")/../.."
# Always anew: another version may be installed by now.
wheels=deploy/wheels
rm -f "$wheels"/*.whl
cp dist/lightning.whl "$wheels"
for target in agent server trainer; do
    # The versions are locked for this platform, whatever yours is.
    docker build --platform linux/amd64 --file deploy/docker/Dockerfile --target "$target" --tag registry.example.org/team/"$target":TAG \
        --tag registry.example.org/team/"$target":current .
    [ "${1:-}" != PUSH ] || docker push registry.example.org/team/"$target":TAG
done
