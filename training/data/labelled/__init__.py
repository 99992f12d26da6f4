"""Labelled texts in CSV, TSV, JSONL and Parquet files."""
