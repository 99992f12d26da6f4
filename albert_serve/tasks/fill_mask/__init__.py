"""Fill-mask: masked tokens from their context."""
