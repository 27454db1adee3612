"""The sampling masks of model calls: the ids among which each token was drawn, kept with the call and used to train it."""
