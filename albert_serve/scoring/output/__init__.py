"""The output of a job: its columns, its formats, and its parts on disk."""
