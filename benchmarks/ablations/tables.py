"""The models that an ablation compares, and the paper's figures for each of them.

The paper's figures are those of ALBERT-base at 125,000 steps (Lan et al. 2019, Tables 3 to 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from albert_serve.config import Sharing
from training.data.examples import SentenceTask

TableName = Literal["sentence", "sharing", "sharing-wide", "embedding", "embedding-unshared"]

_PAPER_HIDDEN_SIZE: Final = 768
# Average over SQuAD 1.1 and 2.0, MNLI, SST-2 and RACE, in percent; Table 3, by E.
_PAPER_EMBEDDING: Final[dict[Sharing, dict[int, float]]] = {
    "all": {64: 79.0, 128: 80.1, 256: 79.6, 768: 79.8},
    "none": {64: 81.3, 128: 81.7, 256: 81.8, 768: 82.3},
}
# Parameters in millions and the same average; Table 4, for E of 128 and of 768.
_PAPER_SHARING: Final[dict[Sharing, tuple[tuple[int, float], tuple[int, float]]]] = {
    "all": ((12, 80.1), (31, 79.8)),
    "attention": ((64, 81.7), (83, 81.6)),
    "ffn": ((38, 80.2), (57, 79.5)),
    "none": ((89, 81.6), (108, 82.3)),
}
# Accuracy at MLM, NSP and SOP, and the average, in percent; Table 5.
_PAPER_SENTENCE: Final[dict[SentenceTask, tuple[float, float, float, float]]] = {
    "none": (54.9, 52.4, 53.3, 79.0),
    "nsp": (54.5, 90.5, 52.0, 79.2),
    "sop": (54.0, 78.9, 86.5, 80.1),
}
_SHARED: Final[dict[Sharing, str]] = {
    "all": "all shared",
    "attention": "attention shared",
    "ffn": "FFN shared",
    "none": "nothing shared",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One model of an ablation: the settings in which models differ."""

    sharing: Sharing
    embedding_size: int
    sentence_task: SentenceTask
    num_steps: int
    seed: int = 0

    @property
    def name(self) -> str:
        """Tells it from the others; the name of its run's folder."""
        return (
            f"share-{self.sharing}-e{self.embedding_size}-{self.sentence_task}"
            f"-{self.num_steps}-steps-seed{self.seed}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationRow:
    """One line of a table.

    Attributes:
        paper: the paper's figures as they are to be shown, one for each of the table's
            `paper_columns`; empty where it has none.
    """

    label: str
    variant: Variant
    paper: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationTable:
    """A comparison of models that differ in one thing."""

    name: TableName
    title: str
    paper_columns: tuple[str, ...]
    rows: tuple[AblationRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationBase:
    """The model from which the tables' rows differ.

    Attributes:
        embedding_size: E, where a table does not vary it.
        embedding_sizes: those of the embedding tables; H is added to them.
        seed: of every run.
    """

    hidden_size: int
    embedding_size: int
    embedding_sizes: tuple[int, ...]
    num_steps: int
    seed: int = 0

    def row(
        self,
        label: str,
        paper: Sequence[str] = (),
        *,
        sharing: Sharing = "all",
        embedding_size: int | None = None,
        sentence_task: SentenceTask = "sop",
        num_steps: int | None = None,
    ) -> AblationRow:
        """Return a line of a table: the base with the given changes."""
        variant = Variant(
            sharing=sharing,
            embedding_size=embedding_size or self.embedding_size,
            sentence_task=sentence_task,
            num_steps=num_steps or self.num_steps,
            seed=self.seed,
        )
        return AblationRow(label=label, variant=variant, paper=tuple(paper))

    def table(self, name: TableName) -> AblationTable:
        """The table of that name."""
        if name == "sentence":
            return self._sentence_table()
        if name.startswith("sharing"):
            return self._sharing_table(name)
        return self._embedding_table(name)

    def _sentence_table(self) -> AblationTable:
        columns = ("paper: MLM", "NSP", "SOP", "Avg")
        rows = [
            self.row(f"{task} trained", [f"{x:.1f}" for x in figures], sentence_task=task)
            for task, figures in _PAPER_SENTENCE.items()
        ]
        # The accuracy of lengths and chance alone.
        rows.insert(0, self.row("after one step", sentence_task="none", num_steps=1))
        title = "Sentence task (Table 5)"
        return AblationTable(name="sentence", title=title, paper_columns=columns, rows=tuple(rows))

    def _sharing_table(self, name: TableName) -> AblationTable:
        is_wide = name == "sharing-wide"
        size = self.hidden_size if is_wide else self.embedding_size
        rows = []
        for sharing, figures in _PAPER_SHARING.items():
            millions, average = figures[is_wide]
            paper = [f"{millions}M", f"{average:.1f}"]
            rows.append(self.row(_SHARED[sharing], paper, sharing=sharing, embedding_size=size))
        paper_size = _PAPER_HIDDEN_SIZE if is_wide else 128
        return AblationTable(
            name=name,
            title=f"What the layers share, E = {size} (Table 4, E = {paper_size})",
            paper_columns=("paper: parameters", "Avg"),
            rows=tuple(rows),
        )

    def _embedding_table(self, name: TableName) -> AblationTable:
        sharing: Sharing = "none" if name == "embedding-unshared" else "all"
        rows = []
        for size in sorted({*self.embedding_sizes, self.hidden_size}):
            paper_size = _PAPER_HIDDEN_SIZE if size == self.hidden_size else size
            average = _PAPER_EMBEDDING[sharing].get(paper_size)
            paper = () if average is None else (str(paper_size), f"{average:.1f}")
            rows.append(self.row(f"E = {size}", paper, sharing=sharing, embedding_size=size))
        return AblationTable(
            name=name,
            title=f"Size of the embeddings, {_SHARED[sharing]} (Table 3)",
            paper_columns=("paper: E", "Avg"),
            rows=tuple(rows),
        )


def distinct_variants(tables: Iterable[AblationTable]) -> list[Variant]:
    """Return every model of the tables once."""
    return list(dict.fromkeys(row.variant for table in tables for row in table.rows))
