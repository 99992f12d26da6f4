"""Batch scoring of files."""
