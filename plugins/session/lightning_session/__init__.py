"""The plugin `session`: a training loop of your own (`Trainer.session`)."""
