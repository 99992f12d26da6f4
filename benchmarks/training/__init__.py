"""Training with this package, against the `Trainer` of `transformers`."""
