"""The served models: each with its engine and queue, and all of them together."""
