"""Scoring on many machines: jobs on Ray, and a scorer for the user's own pipelines."""
