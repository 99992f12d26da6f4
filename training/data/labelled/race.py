"""RACE: the files of its splits in a folder (Lai et al. 2017, https://aclanthology.org/D17-1082).

The official archive has a folder for each split, `train/middle/*.txt` and so on. The same passages
may also be in files named after their split, such as `train.middle.jsonl`, one a line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from training.data.corpus import CorpusError

# As --task names it.
RACE: Final = "race"


def race_files(folder: Path, split: Literal["train", "dev"]) -> list[Path]:
    """Find the files of a split, or the folder of them, in a folder.

    Raises:
        CorpusError: there are none.
    """
    if not folder.is_dir():
        raise CorpusError(f"{folder} is not a folder; give that of the task's files")
    if (folder / split).is_dir():
        return [folder / split]
    files = sorted(folder.glob(f"{split}*.jsonl*"))
    if not files:
        kind = "training" if split == "train" else "held-out"
        raise CorpusError(f"{folder} has no {kind} files {split}/ or {split}*.jsonl")
    return files
