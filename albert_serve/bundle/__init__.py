"""Bundles: manifest, weights, and the catalogue."""
