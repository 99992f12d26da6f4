"""Classify the texts of Parquet files with Spark.

spark-submit examples/spark_pipeline.py --bundle models/albert-small-en reviews.parquet scored
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from albert_serve.scoring import AlbertScorer


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="classify texts with Spark")
    parser.add_argument(
        "--bundle", type=Path, required=True, help="bundle: the same path on each executor"
    )
    parser.add_argument(
        "--column", default="text", help="column of the texts (default: %(default)s)"
    )
    parser.add_argument("input", help="Parquet files to score")
    parser.add_argument("output", help="folder of the scored files")
    options = parser.parse_args(arguments)

    spark = SparkSession.builder.appName("albert-serve").getOrCreate()
    frame = spark.read.parquet(options.input)
    scorer = AlbertScorer(
        options.bundle.absolute(), "text-classification", columns={"text": options.column}
    )
    schema = from_arrow_schema(scorer.schema(to_arrow_schema(frame.schema)))
    # mapInArrow copies less; mapInPandas takes the same two arguments.
    scored = frame.mapInArrow(scorer.map, schema)
    scored.write.mode("overwrite").parquet(options.output)


if __name__ == "__main__":
    main()
