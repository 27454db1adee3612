"""The console in a browser: the Gradio shell, who may open it, and what it may change."""
