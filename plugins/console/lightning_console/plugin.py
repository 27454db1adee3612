"""The console, as a plugin; Gradio is imported when it is opened."""
