#!/bin/sh
# Applies an overlay: sh apply.sh plain|aks|eks. Run it again after a change; what is there is kept.
set -eu
overlay="${1:?say which overlay: plain, aks or eks}"
cd "$(dirname "$0")"
kube() { kubectl --namespace lightning-my-agent "$@"; }
has() { kube get secret "$1" >/dev/null 2>&1; }

kubectl apply --filename base/namespace.yaml --namespace lightning-my-agent
# A password that nobody has to know.
has lightning-store || head -c 24 /dev/urandom | base64 | tr -d '\n' |
    kube create secret generic lightning-store --from-file=password=/dev/stdin
# What the agents read from the environment.
has agent || {
    : "${SEARCH_KEY:?the agent reads it: set it, or create the secret agent with it}"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    printf %s "$SEARCH_KEY" > "$folder/SEARCH_KEY"
    kube create secret generic agent --from-file="$folder"
}
# Pods of a Job cannot be changed. A training that still runs is left alone.
kube get job trainer >/dev/null 2>&1 && [ -n "$(kube get job trainer --output=jsonpath='{.status.completionTime}')" ] &&
    kube delete job trainer
kubectl apply --kustomize "overlays/$overlay"
kube rollout status statefulset/store --timeout=10m
if ! has lightning-tokens; then
    kube apply --filename tokens-pod.yaml
    kube wait --for=condition=Ready pod/tokens --timeout=10m
    runner=$(kube exec tokens -- lightning token create runner --store postgresql://lightning@store:5432/lightning --name clients)
    admin=$(kube exec tokens -- lightning token create admin --project '*' --store postgresql://lightning@store:5432/lightning --name deploy)
    printf '{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "lightning-tokens"}, "stringData": {"runner": "%s", "admin": "%s"}}' \
        "$runner" "$admin" | kube create --filename -
    kube delete pod tokens --wait=false
fi
kube get pods
