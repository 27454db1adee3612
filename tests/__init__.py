"""A package, not a namespace: distributions exist that install a package of this name, which would win over a namespace."""
