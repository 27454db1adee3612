"""The control API: every noun of the store over HTTP, for whoever has a token.

The invariant: see `lightning_server.api.app` for what a request goes through, and `lightning_server.api.table` for what a
route is.
"""
