"""The record plugin: store the texts of calls, assign calls to conversations, take feedback, and pass calls on to providers."""
