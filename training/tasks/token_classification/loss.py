"""Token classification in a run: configuration, data, loss and validation.

Shape legend: C sequences, S positions, T tokens of the longest example, R rows, K outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from albert_serve.bundle.weights import TOKENS
from training.data.batch import ExampleBatch, LossName
from training.loop.validation import Validation
from training.losses import LogitsFunction, LossSums, cross_entropy, example_rows
from training.model.checkpoint import label_keys
from training.model.heads import AlbertForTasks
from training.tasks.base import (
    TRAINING,
    VALIDATION,
    TrainingSetup,
    TrainingTask,
    check_metric,
    hold_out,
)
from training.tasks.engine import HeldOutItems
from training.tasks.token_classification.files import label_names, read_tagged, token_examples
from training.tasks.token_classification.metrics import (
    METRIC,
    entity_items,
    predict_entities,
    validation_metrics,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenConfig:
    """The configuration of token classification in a run.

    Attributes:
        files: files of texts with entities.
        validation: files of held-out texts.
        validation_split: fraction of the texts in `files` that is held out, or 0 for no split.
        metric: metric that selects the best checkpoint, or None for the entities' F1.
    """

    files: Sequence[Path]
    validation: Sequence[Path] = ()
    validation_split: float = 0.0
    metric: str | None = None


def read_tokens(config: TokenConfig, setup: TrainingSetup, batch_size: int) -> TrainingTask:
    """Read and tokenise the texts of the training and validation files."""
    check_metric(config.metric, (METRIC,), "entities")
    texts = {TRAINING: read_tagged(config.files)}
    if config.validation:
        texts[VALIDATION] = read_tagged(config.validation)
    elif config.validation_split:
        texts = hold_out(texts[TRAINING], config.validation_split)
    names = label_names(texts[TRAINING])
    tokenizer, max_positions = setup.tokenizer, setup.architecture.max_positions
    examples = token_examples(texts[TRAINING], tokenizer, names, length=setup.row_length)
    held_out = HeldOutItems(
        task=TOKENS,
        items=list(entity_items(texts.get(VALIDATION, ()), tokenizer, names, length=max_positions)),
        predict=predict_entities,
        compute_metrics=validation_metrics,
    )
    return TrainingTask(
        name=TOKENS,
        streams=(setup.stream(TOKENS, examples, batch_size),),
        losses={TOKENS: partial(token_loss, logits=setup.compiled(_token_logits))},
        validation=Validation(held_out=held_out) if held_out.items else None,
        metric=METRIC,
        labels=label_keys(names),
    )


def _token_logits(model: AlbertForTasks, batch: ExampleBatch) -> Tensor:
    """Return the logits (C * T, K) of the tokens that correspond to the targets (C, T)."""
    rows_CS, _ = example_rows(batch)
    rows_CT = rows_CS[:, : batch.targets.shape[1]]
    return model.logits(TOKENS, model(batch.tokens, rows_CT.flatten()))


def token_loss(
    model: AlbertForTasks, batch: ExampleBatch, logits: LogitsFunction = _token_logits
) -> dict[LossName, LossSums]:
    """Return the cross-entropy of the tags of words' first tokens."""
    targets_R, count = batch.targets.flatten(), batch.counts[TOKENS]
    return {TOKENS: cross_entropy(logits(model, batch), targets_R, count)}
