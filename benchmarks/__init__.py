"""Measurements of this package, alone and against others."""
