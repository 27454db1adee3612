"""A tool-using math agent in plain Python with the `openai` client, and the tiny model it is trained on."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
"""The base model's folder: any `transformers` or vLLM loads it."""
