"""Any program as an agent: a command line that each rollout runs in its own folder; and tasks in Harbor's format."""
