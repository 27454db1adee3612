"""APIs that the gateway offers besides OpenAI's chat: OpenAI's completions and Responses, and Anthropic's Messages."""
