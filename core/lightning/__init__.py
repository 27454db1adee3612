"""lightning: make an agent that already exists better by reinforcement learning."""
