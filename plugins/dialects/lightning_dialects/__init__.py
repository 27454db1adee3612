"""APIs that the gateway speaks besides OpenAI's chat and completions: the Responses API and Anthropic's Messages."""
