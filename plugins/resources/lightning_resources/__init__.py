"""Resources: versions of prompts, weights and settings, and aliases that point to versions. It adds operations to every store,
the command `lightning resources`, prompts that a run takes from `resource:NAME@ALIAS`, and a version of the weights that a run
trains."""
