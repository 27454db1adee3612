"""`/v1/messages`: Anthropic's Messages API, asked of vLLM as a chat completion.

The invariant: the prompt is the one that the same conversation would have had through `/v1/chat/completions`.
"""

from lightning.gateway.dialects.messages.dialect import Messages

__all__ = ["Messages"]
