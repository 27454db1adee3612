"""Who is asking: the agents' keys, whose call it is, and what an address may do."""
