"""APIs that the gateway speaks besides OpenAI's chat: OpenAI's completions and Responses, and Anthropic's Messages."""
