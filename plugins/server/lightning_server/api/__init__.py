"""The control API: the store's data over HTTP, for everybody who has a token.

The invariant: `lightning_server.api.app` says in which order a request is checked, `lightning_server.api.table` what a route
is.
"""
