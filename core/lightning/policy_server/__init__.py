"""policy_server room."""
