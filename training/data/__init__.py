"""Data pipeline: text files, tokenised shards, examples, packed batches."""
