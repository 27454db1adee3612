"""algorithms room."""
