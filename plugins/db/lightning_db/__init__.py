"""Looking after a database: what is in it, copies of it, taking away what nothing needs any more, and its content as files.

The invariant: whatever is taken away was asked for by name, and nothing that a run needs to go on is, unless that was asked for
too.
"""
