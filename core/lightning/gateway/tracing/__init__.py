"""OpenTelemetry spans that arrive at the gateway, and which rollout they belong to."""
