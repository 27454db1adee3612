"""A web page on which people see their agent learn, and why.

The invariant: it reads. Only named actions, each with its own scope, change anything; and nothing here can hold up a training.
"""
