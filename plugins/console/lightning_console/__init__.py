"""A web page on which people see their agent learn, and why.

The invariant: the console only reads. Only named actions, each with its own scope, change anything, and nothing here can delay
a training run.
"""
