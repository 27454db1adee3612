"""Several gateways before one policy: what they and the trainer tell each other, and each one's part in it."""
