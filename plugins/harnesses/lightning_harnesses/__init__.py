"""Calls that are recorded and not trained: rules of the user, and the side calls and compactions of known programs."""
