"""Engines: the objects that hold the model's weights and train them."""
