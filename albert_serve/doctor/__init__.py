"""Description and measurement of a bundle: `albert-serve info` and `doctor`."""
