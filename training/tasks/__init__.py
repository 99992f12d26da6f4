"""Training tasks. The modules for a task's files, loss and metrics are in a folder of its own."""
