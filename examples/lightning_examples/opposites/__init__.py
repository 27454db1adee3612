"""Two players with one prompt and opposite aims: an agent that only a policy for each player can win."""
