"""A question-answering agent of the OpenAI Agents SDK that searches in several hops, and the tiny model it is trained on."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
"""The base model's folder: any `transformers` or vLLM loads it."""

CORPUS = Path(__file__).parent / "corpus.jsonl"
"""The documents the agent searches in: one `{"title": ..., "text": ...}` on each line."""
