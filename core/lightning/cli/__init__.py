"""The `lightning` command, which people type in a shell."""
