"""The recipe of models/albert-small-en."""
