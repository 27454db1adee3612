"""The policy servers behind the gateway: finding one, sending a call, and ending it."""
