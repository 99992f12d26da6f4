"""Sentence order: whether one text follows another, and the best order of several."""
