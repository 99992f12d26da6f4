"""Replies that are the same for everybody: the OpenAPI document, and those that are made once."""
