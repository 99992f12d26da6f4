"""The losses of the tasks, and the steps that they are taken over."""
