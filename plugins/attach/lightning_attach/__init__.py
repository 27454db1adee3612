"""Use of a vLLM that somebody else runs; and weights over the network, to such a vLLM or to one that lightning starts."""
