"""A LangGraph text-to-SQL agent over real SQLite databases, and the tiny model it is trained on."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
"""The base model's folder: any `transformers` or vLLM loads it."""

DATABASES = Path(__file__).parent / "database"
"""The databases, laid out as Spider's are: `<db_id>/<db_id>.sqlite`."""
