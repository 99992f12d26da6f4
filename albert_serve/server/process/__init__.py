"""The process of a service: its memory, its threads and its PID file."""
