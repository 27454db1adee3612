"""A long task for a real model of 135 M parameters: eight choices of one word, and a reward at the end."""
