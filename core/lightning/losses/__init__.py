"""The losses that an engine minimises: pure tensor functions of a micro-batch's tokens."""
