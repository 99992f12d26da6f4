"""Programs around training that are run from a checkout."""
