"""The capacity planner: simulates a training run on other machines, from the measured times of a recorded run.

The invariant: nothing here measures. A number is recorded, or comes from a formula whose source is named, or is an assumption
that is listed with the result, or follows from these by the simulation. Every result says that it is simulated.
"""
