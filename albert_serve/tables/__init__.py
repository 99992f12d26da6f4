"""Data files: their formats, rows and columns, for training and for scoring.

for row in read_rows(file):
    print(row.place, row.error or row.values)
"""

from albert_serve.tables.reader import read_rows
from albert_serve.tables.rows import ReadOptions, Row

__all__ = ["ReadOptions", "Row", "read_rows"]
