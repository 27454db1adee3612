"""Training elsewhere, or many times. `lightning deploy` writes the files to run a training as containers, in a cluster or on a
cloud's machine. `lightning sweep` repeats a training with other seeds and settings, as a queue on this machine.

The invariant: an ordinary `lightning train` runs, with the given arguments. A deployment's files have no secrets and are the
user's to edit. What a sweep knows of a run is in the run's folder, so that a stopped sweep goes on from the folders.
"""
