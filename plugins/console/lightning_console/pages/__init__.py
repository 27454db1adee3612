"""Pages: what an address shows, as blocks. A page asks queries and computes nothing of its own."""
