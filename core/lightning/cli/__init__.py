"""What people type: the `lightning` command."""
