"""Convert an ALBERT checkpoint to a Hugging Face directory that transformers reads.

transformers has no key for --sharing attention, ffn or none. Shared weights are then repeated, so
that each layer has its own copy; the outputs are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from albert_serve.files import replace_folder
from albert_serve.terminal import make_parser
from training.conversion.source import REFERENCE_HELP, open_checkpoint
from training.conversion.standard import write_for_transformers
from training.errors import report_errors

_EXAMPLES: Final = """examples:
  albert-serve convert runs/base/checkpoint for-transformers/
  albert-serve convert albert_base/ checkpoints/albert-base-v2
  albert-serve convert textattack/albert-base-v2-SST-2 checkpoints/sst2

CHECKPOINT is a folder, or a model of the Hugging Face Hub: config.json with weights as safetensors
or pytorch_model.bin, in one file or several, in fp32, fp16 or bf16; or an archive of Google:
albert_config.json, model.ckpt-best.index and .data-..., and 30k-clean.model.
"""


def convert(reference: str | Path, target: Path) -> None:
    """Write a checkpoint for `transformers` into a new folder, which appears only when complete.

    Args:
        reference: folder of a checkpoint, or model on the Hugging Face Hub.
        target: new folder of the result.

    Raises:
        CheckpointError, BundleCorruptError, VocabError: the checkpoint cannot be found or read.
        OSError: the target already exists, or cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} already exists. Choose a new folder.")
    with replace_folder(target) as folder, open_checkpoint(reference) as checkpoint:
        write_for_transformers(checkpoint.folder, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = make_parser("albert-serve convert", __doc__, _EXAMPLES)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=REFERENCE_HELP)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write")
    values = parser.parse_args(arguments)

    def run() -> int:
        convert(values.checkpoint, values.folder)
        print(f"Written to {values.folder}.")
        return 0

    return report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
