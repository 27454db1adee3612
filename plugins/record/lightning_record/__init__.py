"""What is kept of calls besides their tokens, and whose they are: texts, conversations and their feedback, providers."""
