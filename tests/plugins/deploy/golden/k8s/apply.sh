#!/bin/sh
# Builds and pushes the images, then applies an overlay: sh apply.sh plain|aks|eks. Run it again after a change; secrets that are
# there are kept.
set -eu
overlay="${1:?say which overlay: plain, aks or eks}"
cd "$(dirname "$0")"
kube() { kubectl --namespace lightning-my-agent "$@"; }
has() { kube get secret "$1" >/dev/null 2>&1; }

# A Job's pods cannot be changed, and clients with another agent should not join a training that is under way.
if [ "$(kube get job trainer --output=jsonpath='{.status.active}' 2>/dev/null)" = 1 ]; then
    echo "my-agent is still training. To end it: kubectl --namespace lightning-my-agent delete job trainer" >&2
    exit 1
fi
sh ../docker/build.sh PUSH
kubectl apply --filename base/namespace.yaml --namespace lightning-my-agent
# A password that nobody has to know.
has lightning-store || head -c 24 /dev/urandom | base64 | tr -d '\n' |
    kube create secret generic lightning-store --from-file=password=/dev/stdin
# What agents read from the environment: yours, where all of it is set; else what is there.
if [ -n "${SEARCH_KEY:-}" ]; then
    folder=$(mktemp -d)
    printf %s "$SEARCH_KEY" > "$folder/SEARCH_KEY"
    kube create secret generic agent --from-file="$folder" --dry-run=client --output=yaml | kube apply --filename -
    rm -r "$folder"
elif ! has agent; then
    echo "set SEARCH_KEY: agents read it" >&2
    exit 1
fi
# One that has ended, or failed, is made anew, and goes on from its folder.
kube delete job trainer --ignore-not-found
kubectl apply --kustomize "overlays/$overlay"
kube rollout status statefulset/store --timeout=10m
if ! has lightning-tokens; then
    kube delete pod tokens --ignore-not-found
    kube apply --filename tokens-pod.yaml
    kube wait --for=condition=Ready pod/tokens --timeout=10m
    runner=$(kube exec tokens -- lightning token create runner --project default --store postgresql://lightning@store:5432/lightning --name clients)
    admin=$(kube exec tokens -- lightning token create admin --project '*' --store postgresql://lightning@store:5432/lightning --name deploy)
    printf '{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "lightning-tokens"}, "stringData": {"runner": "%s", "admin": "%s"}}' \
        "$runner" "$admin" | kube create --filename -
    kube delete pod tokens --wait=false
fi
kube get pods
