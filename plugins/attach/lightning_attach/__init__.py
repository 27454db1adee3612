"""A vLLM that somebody else runs, and weights over the network: to that one, or to one that lightning starts."""
