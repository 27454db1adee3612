"""A math agent built on AutoGen's AgentChat, Calc-X and GSM8K from disk, and the tiny model it is trained on."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
"""The base model's folder: any `transformers` or vLLM loads it."""
