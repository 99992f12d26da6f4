"""A training run's settings: recipes, command-line options, and the job that builds it."""
