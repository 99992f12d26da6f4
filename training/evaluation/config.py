"""Configuration of an evaluation, whose fields are the command's flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from albert_serve.tasks.question_answering.task import DEFAULT_MAX_SEQ_LEN
from albert_serve.tasks.text_length import TRUNCATION_HELP
from training.data.labelled.folders import RACE
from training.errors import EvaluationError
from training.glue.tasks import TASKS
from training.options.config import Device
from training.options.flags import flag
from training.options.labelled import ENTITIES_HELP, ChoiceFiles, LabelledTexts
from training.options.values import Count, Finite
from training.system.precision import PrecisionName
from training.tasks.question_answering.metrics import MAX_ANSWER_LENGTH


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(LabelledTexts, ChoiceFiles, title="evaluation"):
    """Configuration of an evaluation, whose fields are the command's flags.

    Attributes:
        checkpoint: folder of a checkpoint, or model on the Hugging Face Hub.
        heads: data of the named classifiers.

    Raises:
        EvaluationError: there is no data, or `predictions` lacks data of either texts or questions.
    """

    checkpoint: str
    heads: tuple[LabelledTexts, ...] = ()
    pretraining: tuple[Path, ...] = flag("pretraining: held-out text, as files or folders", ())
    question_answering: tuple[Path, ...] = flag("question answering: files in SQuAD's format", ())
    token_classification: tuple[Path, ...] = flag(ENTITIES_HELP, ())
    similarity: tuple[Path, ...] = flag(
        "embeddings: CSV, TSV, JSONL or Parquet files of pairs with a score (sentence1, "
        "sentence2, score; or STS-B's)",
        (),
    )
    retrieval: tuple[Path, ...] = flag(
        "embeddings: files of queries with a matching text (query, answer; anchor, positive; "
        "...), which is searched among the texts of all pairs",
        (),
    )
    embedding_columns: tuple[str, ...] = flag(
        "columns of --similarity or --retrieval: the two texts, then the score (default: the "
        "usual names)",
        (),
        metavar="NAME",
    )
    truncation: bool = flag(TRUNCATION_HELP, default=True)
    max_seq_length: Count | None = flag(
        "maximum tokens of a question with a window of its context "
        f"(default: {DEFAULT_MAX_SEQ_LEN}, or the model's positions if fewer)"
    )
    max_answer_length: Count = flag("maximum tokens of an answer", MAX_ANSWER_LENGTH)
    null_score_diff_threshold: Finite = flag(
        'threshold for files with unanswerable questions: "no answer" wins if its logit exceeds'
        " the best answer's by more; the metrics include the best value",
        0.0,
        metavar="LOGITS",
    )
    predictions: Path | None = flag(
        "file for predictions in the official format. --task: TSV, of the test file if it"
        " exists; questions: JSON, next to files with the best answers and the null scores",
        metavar="FILE",
    )
    length: Count = flag("tokens per row of held-out text", 128)
    output: Path | None = flag(
        "file of the metrics (default: evaluation.json in the checkpoint's folder)"
    )
    device: Device = flag(
        "device: auto, cpu, cuda, cuda:1, ...; auto uses the GPU if there is one", "auto"
    )
    precision: PrecisionName = flag(
        "precision of matrix products; auto measures which is faster", "fp32"
    )

    def __post_init__(self) -> None:
        """Check that there is data, and that predictions belong to one kind of data."""
        super().__post_init__()
        texts, questions = self.has_texts, bool(self.question_answering)
        other_data = (self.pretraining, self.similarity, self.retrieval, self.token_classification)
        if not (texts or questions or self.has_choices or any(other_data)):
            raise EvaluationError(
                "There is nothing to evaluate. Use --pretraining, --text-classification, "
                "--multiple-choice, --task, --head, --question-answering, "
                "--token-classification, --similarity or --retrieval."
            )
        if self.predictions is not None and texts == questions:
            raise EvaluationError(
                "--predictions requires the data of either texts or questions. Use one of them."
            )

    @property
    def has_texts(self) -> bool:
        """Whether text classifiers are evaluated."""
        return bool(self.heads or self.text_classification or self.task in TASKS)

    @property
    def has_choices(self) -> bool:
        """Whether multiple choice is evaluated."""
        return bool(self.multiple_choice or self.task == RACE)

    @property
    def metrics_file(self) -> Path | None:
        """File of the metrics, or None for a model on the Hub without --output."""
        folder = Path(self.checkpoint)
        return self.output or (folder / "evaluation.json" if folder.is_dir() else None)
