"""Lightning Server and Lightning Client: control API, tokens, projects, guarded ports, remote agents, stores over HTTP."""
