"""Pages: what an address shows, as blocks. What several pages ask of a store is in `queries`, what one asks is beside it."""
