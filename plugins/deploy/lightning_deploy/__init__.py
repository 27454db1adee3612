"""A training somewhere else, and in number: `lightning deploy` writes the files with which it runs as containers, in a cluster
or on a cloud's machine; `lightning sweep` repeats it with other seeds and settings, as a queue on this machine.

The invariant: what runs is an ordinary `lightning train` with the arguments that were given. A deployment's files hold no
secret and belong to people; what a sweep knows of a run is in the run's folder, so a sweep that was stopped goes on from them.
"""
