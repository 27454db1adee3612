"""An AutoGen agent with a calculator on a real open LLM, SmolLM2-135M-Instruct, which cannot calculate."""
