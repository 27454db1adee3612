"""`/v1/responses`: OpenAI's Responses API, asked of vLLM as a chat completion.

The invariant: the prompt is the one that the same conversation would have had through `/v1/chat/completions`.
"""

from lightning.gateway.dialects.responses.dialect import Responses

__all__ = ["Responses"]
