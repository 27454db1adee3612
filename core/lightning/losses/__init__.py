"""Pure tensor functions: per-token losses."""
