"""An Airflow DAG that scores each day's reviews.

A task that was killed, or lost its worker, is retried and keeps its complete parts. If a retry
cannot help (see the statuses in docs/batch.md), the task fails immediately.
"""

from __future__ import annotations

import subprocess
from datetime import datetime, timedelta

from airflow.exceptions import AirflowException, AirflowFailException
from airflow.sdk import dag, task

# Another job writes there, the disk is full, interrupted, SIGTERM.
PASSING = {5, 7, 130, 143}


@dag(
    schedule="15 2 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 5, "retry_delay": timedelta(minutes=10)},
)
def score_reviews() -> None:
    """Score the day's reviews."""

    @task
    def score(ds: str) -> None:
        command = [
            *("albert-serve", "score", "--task", "text-classification"),
            *("--column", "text=review", "--max-errors", "1000"),
            *("--summary", f"/data/scored/{ds}.json"),
            *(f"/data/reviews/{ds}/*.csv", f"/data/scored/{ds}.parquet"),
        ]
        status = subprocess.run(command, check=False).returncode
        if status in PASSING or status < 0:
            raise AirflowException(f"ended with status {status}; the retry resumes")
        if status:
            raise AirflowFailException(f"ended with status {status}")

    score(ds="{{ ds }}")


score_reviews()
