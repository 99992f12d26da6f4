"""Tables in files: their formats, rows and columns, for training and for scoring."""
