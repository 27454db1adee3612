"""Several gateways that serve one policy: the protocol between them and the trainer, and both ends of it."""
