"""A training run: recipes, command-line options, the job that builds it, and its driver."""
