"""Maintains a database: shows its content, copies it, removes unneeded data, and exports it to files.

The invariant: only data that was asked for by name is removed. Data that a run needs to go on is removed only if that was asked
for, too.
"""
