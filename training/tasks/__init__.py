"""Training tasks: a folder each, with the files of its data, its loss and its metrics."""
