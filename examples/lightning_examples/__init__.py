"""Examples that ship with lightning: each folder is one a user copies."""
