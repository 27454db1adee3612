"""Any program as an agent: a command line that each rollout runs in a folder of its own, and tasks in Harbor's format."""
