"""Trajectories become training rows."""
