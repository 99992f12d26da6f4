"""The process of a service: its memory, and the signal to reload."""
