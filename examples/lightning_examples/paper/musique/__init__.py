"""Multi-hop questions of MuSiQue with the OpenAI Agents SDK."""
