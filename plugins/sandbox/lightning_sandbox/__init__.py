"""A sandbox for each agent's process, of bubblewrap; and what an agent needs to make one for a program that it runs."""
