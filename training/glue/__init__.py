"""The tasks of GLUE: their official files, labels and metrics."""
