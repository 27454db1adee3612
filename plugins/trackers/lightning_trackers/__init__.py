"""Trackers of other systems: TensorBoard and OpenTelemetry. Each is imported when a run begins that asks for it."""
