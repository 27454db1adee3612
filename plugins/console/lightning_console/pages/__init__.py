"""One module for each kind of page, which makes the blocks of an address. Queries that several pages share are in `queries`."""
