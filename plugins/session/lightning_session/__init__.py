"""A training loop of your own (`Trainer.session`)."""
