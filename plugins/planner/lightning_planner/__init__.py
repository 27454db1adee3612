"""The capacity planner: what a training run would take on other machines, simulated from what a recorded run took.

The invariant: nothing here measures. A number is a recorded one, a formula whose source is named, an assumption that is
listed with the result, or follows from these by the simulation; and every result says that it is one.
"""
