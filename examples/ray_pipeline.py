"""Classify the texts of Parquet files with Ray Data, on this machine or on a cluster (RAY_ADDRESS).

python examples/ray_pipeline.py --bundle models/albert-small-en reviews.parquet scored/
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray

from albert_serve.scoring import AlbertScorer


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="classify texts with Ray Data")
    parser.add_argument(
        "--bundle", type=Path, required=True, help="bundle: the same path on each node"
    )
    parser.add_argument(
        "--column", default="text", help="column of the texts (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=1, help="engines (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPUs per engine (default: %(default)s)"
    )
    parser.add_argument("input", help="Parquet files to score")
    parser.add_argument("output", help="folder of the scored files")
    options = parser.parse_args(arguments)

    scored = ray.data.read_parquet(options.input).map_batches(
        AlbertScorer,
        fn_constructor_kwargs={
            "bundle": options.bundle.absolute(),
            "task": "text-classification",
            "columns": {"text": options.column},
            "num_threads": options.threads,
        },
        batch_format="pyarrow",
        batch_size=1024,
        compute=ray.data.ActorPoolStrategy(size=options.workers),
        num_cpus=options.threads,
    )
    scored.write_parquet(options.output)


if __name__ == "__main__":
    main()
