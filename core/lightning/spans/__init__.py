"""OpenTelemetry GenAI spans, in and out."""
