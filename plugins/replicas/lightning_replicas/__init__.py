"""Several policy servers for one policy: how many there are, on which GPUs, and which of them gets an attempt's calls."""
