"""Files that an evaluation writes: reports for people, and predictions for official scripts."""
