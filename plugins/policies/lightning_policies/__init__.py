"""Several policies in one run: which agents each one answers, how each is trained, and how all of them are served."""
