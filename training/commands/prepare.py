"""Tokenise a corpus once, for all runs that train on it.

The output folder gets shards of at most 60 MiB and `shards.json`. To resume after an interruption,
repeat the command. The number of workers and interruptions do not change the files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Final

from albert_serve.settings import num_usable_cpus
from albert_serve.terminal import make_parser
from training.data.corpus import TEXT_COLUMN_HELP
from training.data.preparation import prepare
from training.errors import report_errors
from training.options.flags import Options, add_flags, flag, read_flags
from training.options.values import Count

_INTERRUPTED: Final = 130
_EXAMPLES: Final = r"""examples:
  albert-serve prepare --corpus wiki/*.jsonl.xz --tokenizer vocab/ --output shards/
  albert-serve prepare --corpus books/ web.parquet --tokenizer vocab/ --output shards/ \
      --workers 16
"""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Options, title="corpus"):
    """A corpus, its tokenizer, and the folder of the result."""

    corpus: tuple[Path, ...] = flag(
        "text, JSON, CSV or Parquet files, plain, .gz, .xz, .bz2 or .zst, or folders", MISSING
    )
    text_column: str | None = flag(TEXT_COLUMN_HELP, metavar="NAME")
    tokenizer: Path = flag("folder that albert-serve vocab wrote", MISSING)
    output: Path = flag("folder to write", MISSING)
    workers: Count | None = flag("worker processes (default: the number of usable CPUs)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = make_parser("albert-serve prepare", __doc__, _EXAMPLES)
    add_flags(parser, PrepareConfig)
    values = parser.parse_args(arguments)
    return report_errors(lambda: _run(read_flags(PrepareConfig, values)))


def _run(config: PrepareConfig) -> int:
    try:
        shards = prepare(
            config.corpus,
            config.tokenizer / "tokenizer.json",
            config.output,
            text_column=config.text_column,
            num_workers=config.workers or num_usable_cpus(),
        )
    except KeyboardInterrupt:
        print("\nStopped. Repeat the command to resume.", file=sys.stderr)
        return _INTERRUPTED
    print(
        f"{config.output}: {sum(part.num_documents for part in shards.parts):,} documents, "
        f"{sum(part.num_sentences for part in shards.parts):,} sentences, "
        f"{shards.num_tokens:,} tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
