"""Labelled texts of CSV, TSV, JSONL and Parquet files."""
