#!/bin/sh
# Builds the three images, from the project's folder: sh deploy/docker/build.sh [PUSH]
set -eu
cd "$(dirname "$0")/../.."
wheels=deploy/wheels
if ! ls "$wheels"/lightning-VERSION-*.whl >/dev/null 2>&1; then
    python3 -m pip download --quiet --no-deps --dest "$wheels" lightning==VERSION
fi
for target in agent server trainer; do
    docker build --file deploy/docker/Dockerfile --target "$target" --tag registry.example.org/team/"$target":TAG .
    [ "${1:-}" != PUSH ] || docker push registry.example.org/team/"$target":TAG
done
