"""The console in a browser: the Gradio application, access control, the actions that change something, and the chat."""
