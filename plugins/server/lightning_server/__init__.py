"""The plugin `server`: Lightning Server, Lightning Client, and stores over HTTP."""
