"""Text-to-SQL on Spider with LangGraph."""
