"""Where a step's groups come from besides sampling in turns: rollouts that go on, records, an order of tasks that learns."""
