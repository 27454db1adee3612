"""What agents are held to on a machine: a sandbox of bubblewrap for each one's process, or for a program that it runs; and how
many runs of a tool are under way at once."""
