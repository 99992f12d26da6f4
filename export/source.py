"""A checkpoint folder, read and checked for export."""

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

# Besides the weights and `tokenizer.json`, transformers and training read these files.
HUGGING_FACE_FILES: Final = ("config.json", "tokenizer_config.json", "spiece.model", "vocab.txt")
_JSON_OBJECT: Final = TypeAdapter(dict[str, JsonValue])
_THRESHOLD: Final = TypeAdapter(Annotated[FiniteFloat, Strict()] | None)
# Fields of a manifest's heads that may be set after training.
_TUNED_FIELDS: Final = {"temperature", "null_score_diff_threshold"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A checkpoint that can be exported.

    Attributes:
        folder: folder of the checkpoint.
        config: sizes of the model.
        heads: manifest entries of the heads to export.
        has_choices: whether the checkpoint has a multiple-choice head, which is not served.
        tensors: locations of the weights in `model.safetensors`, by stored name.
        needed_names: stored names of the weights that the backbone and all heads need.
        evaluation: content of `evaluation.json`, or the evaluation in a bundle's manifest.
        training: content of `training.json`, or the record of training in a bundle's manifest.
        examples: examples for the service's page from a bundle's manifest, by task.
    """

    folder: Path
    config: AlbertConfig
    heads: dict[str, HeadEntry]
    has_choices: bool
    tensors: dict[str, StoredTensor]
    needed_names: frozenset[str]
    evaluation: dict[str, Any]
    training: dict[str, Any]
    examples: dict[str, list[TaskExample]]

    @property
    def weights_file(self) -> Path:
        """The file with the weights."""
        return self.folder / WEIGHTS_FILE

    @property
    def names(self) -> list[str]:
        """The stored names of the weights that the backbone and the heads need."""
        shapes = needed_shapes(self.config, self.heads)
        return [stored_name(name, self.tensors) for name in shapes]

    @property
    def tasks(self) -> list[TaskName]:
        """The tasks of the heads."""
        return [head for head in self.heads if is_task(head)]

    @property
    def num_outputs(self) -> dict[str, int]:
        """The number of outputs of each head."""
        return {head: entry.num_outputs for head, entry in self.heads.items()}


def read_source(folder: Path) -> Source:
    """Read a checkpoint's configuration and the header of its weights, and compare the two.

    A bundle in fp32 is a checkpoint, too: its temperatures, threshold and examples are retained.

    Args:
        folder: checkpoint in the standard format of `training.conversion.standard`.
    """
    hf = read_config(folder)
    config = check_config(hf, folder)
    _check_files(folder)
    tensors = read_header(folder / WEIGHTS_FILE)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    heads = find_tasks(shapes, hf.get("architectures") or ())
    manifest = read_manifest(folder) if (folder / MANIFEST_FILE).is_file() else None
    entries = _read_heads(hf, heads)
    if manifest is not None:
        entries = {
            head: entry.model_copy(
                update=manifest.heads[head].model_dump(include=_TUNED_FIELDS, exclude_unset=True)
            )
            if head in manifest.heads
            else entry
            for head, entry in entries.items()
        }
    names = _check_weights(tensors, config, entries)
    _check_finite(folder / WEIGHTS_FILE, {name: tensors[name] for name in names})
    return Source(
        folder=folder,
        config=config,
        heads=entries,
        has_choices=MULTIPLE_CHOICE in heads,
        tensors=tensors,
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
    """Return the source with the "no answer" threshold of question answering.

    The first of these that exists is used: `option`, the best threshold in `results`, the threshold
    in a bundle's manifest, and the best threshold in the checkpoint's evaluation.

    Args:
        source: checkpoint.
        option: threshold that the user requested, or None.
        results: results of the evaluation that the user passed.
    """
    entry = source.heads.get("question-answering")
    if entry is None:
        if option is None:
            return source
        raise ExportError(
            "--null-score-diff-threshold requires question-answering; the bundle has "
            f"{', '.join(source.tasks) or 'no task with a head'}. Omit the option, or add the task "
            "with --tasks."
        )
    in_manifest, key = entry.null_score_diff_threshold, BEST_F1_THRESHOLD
    values = (option, results.get(key), in_manifest, source.evaluation.get(key))
    threshold = next((value for value in values if value is not None), None)
    try:
        threshold = _THRESHOLD.validate_python(threshold)
    except ValidationError as error:
        raise ExportError(
            f"{key} of the evaluation is {threshold!r}, not a number. Correct or remove it."
        ) from error
    entry = entry.model_copy(update={"null_score_diff_threshold": threshold})
    return replace(source, heads={**source.heads, "question-answering": entry})


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file, or return an empty object if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        return _JSON_OBJECT.validate_json(file.read_bytes())
    except ValueError as error:
        raise ExportError(f"{file} is not a JSON object: {describe_faults(error)}.") from error


def read_weight(file: Path, tensor: StoredTensor) -> np.memmap[Any, np.dtype[np.float32]]:
    """Memory-map an fp32 weight."""
    return np.memmap(file, np.dtype("<f4"), "r", tensor.offset, tensor.shape)


def _check_files(folder: Path) -> None:
    if not (folder / TOKENIZER_FILE).is_file():
        raise ExportError(
            f"{folder} has neither {TOKENIZER_FILE} nor spiece.model nor vocab.txt. Copy one of "
            "them from the origin of the checkpoint."
        )


def _read_heads(hf: Mapping[str, Any], heads: Mapping[Task, int]) -> dict[str, HeadEntry]:
    """Return the manifest entries of the heads that are served.

    Args:
        hf: content of `config.json`.
        heads: number of outputs by head.
    """
    entries: dict[str, HeadEntry] = {}
    for head, num_outputs in heads.items():
        if head == "sentence-order" and hf.get("albert_sentence_task") == "nsp":
            continue  # this head predicts whether two texts belong together, not their order
        if not is_task(task_of(head)):
            continue
        fields: dict[str, Any] = {}
        if is_classifier(head):
            labels = read_labels(hf, num_outputs, head)
            fields = {"labels": labels.names, "problem_type": labels.problem}
            fields["temperature"] = read_temperature(hf, head)
            fields["name"] = default_name(hf) if head == CLASSIFICATION else None
        elif head == TOKENS:
            fields = {"labels": read_labels(hf, num_outputs, head).names}
        graph = f"{head.replace('/', '-')}.onnx"
        entries[head] = HeadEntry(graph=graph, num_outputs=num_outputs, **fields)
    return entries


def _check_weights(
    tensors: Mapping[str, StoredTensor], config: AlbertConfig, heads: Mapping[str, HeadEntry]
) -> list[str]:
    """Check that all weights are present, in fp32 and of the right shape; return their names."""
    expected = needed_shapes(config, heads)
    names = [stored_name(name, tensors) for name in expected]
    check_shapes(tensors, expected)
    return names


def _check_finite(file: Path, tensors: Mapping[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        if not np.isfinite(read_weight(file, tensor)).all():
            raise ExportError(
                f"{file}: {name} contains NaN or infinite numbers. Export another checkpoint."
            )
