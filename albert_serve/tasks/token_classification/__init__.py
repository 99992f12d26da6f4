"""Token classification: the entities of a text."""
