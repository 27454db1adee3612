"""Where metrics and finished rollouts go besides the store.

The invariant: training neither waits for a tracker nor fails with one. Nothing is imported here: the plugin is light.
"""
