"""Measurements of this package, alone and beside others."""
