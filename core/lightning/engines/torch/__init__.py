"""engines/torch room."""
