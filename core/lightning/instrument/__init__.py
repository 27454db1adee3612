"""instrument room."""
