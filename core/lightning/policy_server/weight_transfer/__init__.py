"""New weights over the network: from the process that has them to vLLM's workers, which need not see its disk."""
