"""Training tasks, with a folder for the files, loss and metrics of each task."""
