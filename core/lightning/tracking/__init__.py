"""tracking room."""
