"""How tiny base models are made from nothing: a tokenizer with ChatML and tool calls, a Qwen3 of a few hundred thousand
weights, and a warm start on demonstrations. Nothing here knows what the demonstrations are about.
"""
