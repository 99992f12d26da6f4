"""Measurements of this package, alone and compared with other software."""
