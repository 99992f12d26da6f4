"""A checkpoint directory, read and validated for export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

import numpy as np
from pydantic import FiniteFloat, JsonValue, Strict, TypeAdapter, ValidationError

from albert_serve.bundle.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    HeadEntry,
    Manifest,
    TaskExample,
    needed_shapes,
    read_manifest,
)
from albert_serve.bundle.weights import (
    CLASSIFICATION,
    TOKENS,
    StoredTensor,
    TaskName,
    check_shapes,
    is_task,
    read_header,
    stored_name,
    task_of,
)
from albert_serve.config import AlbertConfig
from albert_serve.errors import describe_faults
from export.config import ExportError
from training.model.checkpoint import (
    check_config,
    find_tasks,
    read_config,
)
from training.model.heads import MULTIPLE_CHOICE, Task, is_classifier
from training.model.labels import default_name, read_labels, read_temperature
from training.tasks.question_answering.metrics import BEST_F1_THRESHOLD

# transformers and training read these files, besides the weights and `tokenizer.json`.
HUGGING_FACE_FILES: Final = ("config.json", "tokenizer_config.json", "spiece.model", "vocab.txt")
_JSON_OBJECT: Final = TypeAdapter(dict[str, JsonValue])
_THRESHOLD: Final = TypeAdapter(Annotated[FiniteFloat, Strict()] | None)
# What a manifest sets about a head, after training.
_TUNED: Final = {"temperature", "null_score_diff_threshold"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A checkpoint that can be exported.

    Attributes:
        heads: its heads that are exported, as in a manifest.
        has_choices: whether it holds a head for multiple choice, which is not served.
        stored: its weights' places in `model.safetensors`, by their names there.
        needed_names: names of the weights that the backbone and all heads of the checkpoint need.
        evaluation: content of its `evaluation.json`, or what a bundle's manifest has of it.
        training: content of its `training.json`, likewise.
        examples: inputs that the service's page shows, of a bundle's manifest.
    """

    folder: Path
    config: AlbertConfig
    heads: dict[str, HeadEntry]
    has_choices: bool
    stored: dict[str, StoredTensor]
    needed_names: frozenset[str]
    evaluation: dict[str, Any]
    training: dict[str, Any]
    examples: dict[str, list[TaskExample]]

    @property
    def weights_file(self) -> Path:
        """The file of the weights."""
        return self.folder / WEIGHTS_FILE

    @property
    def names(self) -> list[str]:
        """The stored names of the weights that the backbone and the heads need."""
        shapes = needed_shapes(self.config, self.heads)
        return [stored_name(name, self.stored) for name in shapes]

    @property
    def tasks(self) -> list[TaskName]:
        """The tasks of the heads."""
        return [head for head in self.heads if is_task(head)]

    @property
    def num_outputs(self) -> dict[str, int]:
        """The outputs of each head."""
        return {head: entry.num_outputs for head, entry in self.heads.items()}


def read_source(folder: Path) -> Source:
    """Read a checkpoint's configuration and its weights' header, and check one by the other.

    A bundle in fp32 is a checkpoint too; its manifest's temperatures, threshold and examples stay.

    Args:
        folder: in the standard form of `training.conversion.standard`.
    """
    hf = read_config(folder)
    config = check_config(hf, folder)
    _check_files(folder)
    stored = read_header(folder / WEIGHTS_FILE)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    heads = find_tasks(shapes, hf.get("architectures") or ())
    manifest = read_manifest(folder) if (folder / MANIFEST_FILE).is_file() else None
    entries = _read_heads(hf, heads)
    if manifest is not None:
        entries = {
            head: entry.model_copy(
                update=manifest.heads[head].model_dump(include=_TUNED, exclude_unset=True)
            )
            if head in manifest.heads
            else entry
            for head, entry in entries.items()
        }
    names = _check_weights(stored, config, entries)
    _check_finite(folder / WEIGHTS_FILE, {name: stored[name] for name in names})
    return Source(
        folder=folder,
        config=config,
        heads=entries,
        has_choices=MULTIPLE_CHOICE in heads,
        stored=stored,
        needed_names=frozenset(names),
        evaluation=read_json_object(folder / "evaluation.json")
        or (dict(manifest.evaluation) if manifest else {}),
        training=read_json_object(folder / "training.json") or _training_of(manifest),
        examples=dict(manifest.examples) if manifest else {},
    )


def _training_of(manifest: Manifest | None) -> dict[str, Any]:
    """Return the record of training in a bundle's manifest, if it has one."""
    training = manifest.provenance.get("training") if manifest else None
    return training if isinstance(training, dict) else {}


def with_threshold(
    source: Source, option: float | None, results: Mapping[str, Any] = MappingProxyType({})
) -> Source:
    """Return the source with the threshold of "no answer" of question answering.

    Args:
        option: None for the threshold of the best F1 in `results`, or else the one of a bundle's
            manifest, or else that of the best F1 in the evaluation, as far as there is one.
    """
    entry = source.heads.get("question-answering")
    if entry is None:
        if option is None:
            return source
        raise ExportError(
            "--null-score-diff-threshold is of question-answering; the bundle has "
            f"{', '.join(source.tasks) or 'no task with a head'}, --tasks names others"
        )
    own, evaluated = entry.null_score_diff_threshold, source.evaluation.get(BEST_F1_THRESHOLD)
    values = (option, results.get(BEST_F1_THRESHOLD), own, evaluated)
    threshold = next((value for value in values if value is not None), None)
    try:
        threshold = _THRESHOLD.validate_python(threshold)
    except ValidationError as error:
        raise ExportError(
            f"{BEST_F1_THRESHOLD} of the evaluation is {threshold!r}, not a number"
        ) from error
    entry = entry.model_copy(update={"null_score_diff_threshold": threshold})
    return replace(source, heads={**source.heads, "question-answering": entry})


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file; an empty object without the file."""
    if not file.is_file():
        return {}
    try:
        return _JSON_OBJECT.validate_json(file.read_bytes())
    except ValueError as error:
        raise ExportError(f"{file} is not a JSON object: {describe_faults(error)}") from error


def read_weight(file: Path, tensor: StoredTensor) -> np.memmap[Any, np.dtype[np.float32]]:
    """Memory-map an fp32 weight."""
    return np.memmap(file, np.dtype("<f4"), "r", tensor.offset, tensor.shape)


def _check_files(folder: Path) -> None:
    if not (folder / TOKENIZER_FILE).is_file():
        raise ExportError(
            f"{folder} has neither {TOKENIZER_FILE} nor spiece.model nor vocab.txt; copy one of "
            "them there from where the checkpoint comes from"
        )


def _read_heads(hf: Mapping[str, Any], heads: Mapping[Task, int]) -> dict[str, HeadEntry]:
    """Return the entries of the heads that are served, with these numbers of outputs."""
    entries: dict[str, HeadEntry] = {}
    for head, num_outputs in heads.items():
        if head == "sentence-order" and hf.get("albert_sentence_task") == "nsp":
            continue  # the head tells whether a text follows, not in what order two stand
        if not is_task(task_of(head)):
            continue
        known: dict[str, Any] = {}
        if is_classifier(head):
            labels = read_labels(hf, num_outputs, head)
            known = {"labels": labels.names, "problem_type": labels.problem}
            known["temperature"] = read_temperature(hf, head)
            known["name"] = default_name(hf) if head == CLASSIFICATION else None
        elif head == TOKENS:
            known = {"labels": read_labels(hf, num_outputs, head).names}
        graph = f"{head.replace('/', '-')}.onnx"
        entries[head] = HeadEntry(graph=graph, num_outputs=num_outputs, **known)
    return entries


def _check_weights(
    stored: Mapping[str, StoredTensor], config: AlbertConfig, heads: Mapping[str, HeadEntry]
) -> list[str]:
    """Check that all weights are there, fp32 and of the right shape; return their stored names."""
    expected = needed_shapes(config, heads)
    names = [stored_name(name, stored) for name in expected]
    check_shapes(stored, expected)
    return names


def _check_finite(file: Path, tensors: Mapping[str, StoredTensor]) -> None:
    bad = [
        name for name, tensor in tensors.items() if not np.isfinite(read_weight(file, tensor)).all()
    ]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ExportError(
            f"{file}: {bad[0]}{more} hold NaN or infinite numbers; nothing is exported"
        )
