"""The token-budget queue in front of the engine."""
