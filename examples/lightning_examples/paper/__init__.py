"""The three experiments of the Agent Lightning paper (arXiv 2508.03680, §4). Not run at full size: no GPU was at hand."""
