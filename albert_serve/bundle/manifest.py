"""The bundle that the service opens: its manifest, and integrity checks.

A bundle is a folder: `manifest.json`, `model.safetensors`, `tokenizer.json`, `encoder.onnx` and
one graph per task. The manifest lists the size and SHA-256 of all other files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)

from albert_serve.bundle.sentence_vectors import SentenceVectors
from albert_serve.bundle.weights import (
    CLASSIFICATION,
    HEAD_NAME,
    Shape,
    TaskName,
    check_shapes,
    expected_shapes,
    is_task,
    name_of,
    named_head,
    read_header,
    task_of,
)
from albert_serve.config import AlbertConfig
from albert_serve.config import Precision as Precision
from albert_serve.errors import (
    BundleCorruptError,
    BundleError,
    BundleMissingError,
    ConfigError,
    describe_faults,
)
from albert_serve.files import read_small_file, sha256_of

_FORMAT_VERSION: Final = 3

# The default classifier has this name, unless the checkpoint has another name for it.
DEFAULT_HEAD: Final = "default"
MAX_EXAMPLES: Final = 20
_MAX_MANIFEST_BYTES: Final = 16 << 20
MANIFEST_FILE: Final = "manifest.json"
CARD_FILE: Final = "README.md"
WEIGHTS_FILE: Final = "model.safetensors"
TOKENIZER_FILE: Final = "tokenizer.json"
ENCODER_FILE: Final = "encoder.onnx"
CUDA_ENCODER_FILE: Final = "encoder.cuda.onnx"
CUDA_SUFFIX: Final = ".cuda.onnx"

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
Verification = Literal["hash", "size"]
ComputePrecision = Literal["fp16", "bf16", "fp32"]
# These parts can stay in fp32 if the other matrices have a lower precision.
Part = Literal["embeddings", "attention", "ffn", "heads"]


# A manifest must not refer to files outside its folder.
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_HeadName = Annotated[str, Field(pattern=f"^{HEAD_NAME}$")]
# The only head of a task, or the default head, has the name of the task.
_Head = TaskName | Annotated[str, Field(pattern=f"^{CLASSIFICATION}/{HEAD_NAME}$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class FileEntry(_Frozen):
    """One file of a bundle: its SHA-256 as hexadecimal digits, and its size in bytes."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    size: int = Field(ge=0)


class Quality(_Frozen):
    """The quality of a head before and after export, measured on labelled data.

    Attributes:
        metric: name of the metric, such as "accuracy".
        torch: metric of the checkpoint in percent, computed by torch in fp32.
        bundle: metric of the bundle in percent.
        count: number of predictions.
        data: names of the data files.
    """

    metric: str
    torch: float
    bundle: float
    count: int = Field(ge=1)
    data: list[str] = Field(default_factory=list)

    @property
    def cost(self) -> float:
        """The percentage points that export lost, negative if the bundle is better."""
        return self.torch - self.bundle


class HeadEntry(_Frozen):
    """One head of a bundle.

    Attributes:
        graph: file of the graph from rows (R, H) to logits (R, num_outputs).
        labels: names of the outputs, in order, if they have names.
        name: name of the default classifier in requests (default: `default`).
        problem_type: Hugging Face's problem type of a text classifier.
        temperature: divisor of a classifier's logits before softmax or sigmoid.
        null_score_diff_threshold: margin by which the logit of "no answer" must exceed the best
            answer's in question answering. It was tuned on questions with and without answers.
        quality: quality that export measured.
    """

    graph: _FileName
    num_outputs: int = Field(ge=1)
    labels: list[str] | None = None
    name: _HeadName | None = None
    problem_type: ProblemType | None = None
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    null_score_diff_threshold: float | None = Field(None, allow_inf_nan=False)
    quality: Quality | None = None

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if self.labels and len(self.labels) != self.num_outputs:
            raise ValueError(f"{len(self.labels)} labels for {self.num_outputs} outputs")
        return self


class TaskExample(_Frozen):
    """An input of a task that shows the purpose of the model.

    Attributes:
        inputs: one item of a request to the task's endpoint.
        label: short description of the example.
    """

    inputs: JsonValue
    label: str | None = Field(None, min_length=1, max_length=100)


class Manifest(_Frozen):
    """The content of `manifest.json`.

    Attributes:
        config: keys of Hugging Face's `config.json`, which `AlbertConfig.from_hf` reads.
        heads: entry of each head, by the name of its task, or by `named_head` if it is additional.
        precision: storage type of matrices. int8 matrices are also multiplied in int8.
        kept_fp32: parts that stay in fp32.
        parity: largest difference between torch and each graph ("encoder" and the heads), relative
            to the largest value, or to 1 if all values are smaller.
        cuda_precision: type in which the encoder computes on CUDA.
        cuda_parity: parity between torch with the bundle's weights and the CUDA graphs, which a CPU
            emulated.
        evaluation: metrics on held-out data, by name.
        provenance: records of training and export.
        examples: inputs that the page at `/` shows, by task.
        sentence_vectors: default form of embeddings, or None for the mean of all token vectors.
    """

    format_version: int = _FORMAT_VERSION
    config: dict[str, JsonValue]
    heads: dict[_Head, HeadEntry]
    precision: Precision = "fp32"
    kept_fp32: list[Part] = Field(default_factory=list)
    files: dict[_FileName, FileEntry]
    parity: dict[str, float] = Field(default_factory=dict)
    cuda_precision: ComputePrecision = "fp16"
    cuda_parity: dict[str, float] = Field(default_factory=dict)
    evaluation: dict[str, JsonValue] = Field(default_factory=dict)
    provenance: dict[str, JsonValue] = Field(default_factory=dict)
    examples: dict[_Head, Annotated[list[TaskExample], Field(max_length=MAX_EXAMPLES)]] = Field(
        default_factory=dict
    )
    sentence_vectors: SentenceVectors | None = None

    @property
    def tasks(self) -> list[TaskName]:
        """The tasks that have a head."""
        return [head for head in self.heads if is_task(head)]

    def heads_of(self, task: str) -> dict[str, HeadEntry]:
        """Return the heads of a task, the default one first."""
        return {head: entry for head, entry in self.heads.items() if task_of(head) == task}

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [head_name(*head) for head in self.heads_of(CLASSIFICATION).items()]
        if len(set(names)) < len(names):
            raise ValueError(f"two heads are named {names[0]}")
        return self

    @property
    def revision(self) -> str:
        """A hash of 12 hexadecimal digits, which changes with any byte of the bundle."""
        content = self.model_dump_json(exclude_none=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]


def head_name(head: str, entry: HeadEntry) -> str:
    """Return the name by which a request selects a head."""
    return name_of(head) or entry.name or DEFAULT_HEAD


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A verified bundle, which `Bundle.open` makes.

    Attributes:
        folder: folder of the bundle's files.
        config: sizes of the model, from the manifest.
    """

    folder: Path
    manifest: Manifest
    config: AlbertConfig

    @classmethod
    def open(cls, folder: Path, *, verify: Verification = "hash") -> Bundle:
        """Read the manifest and check every file against it.

        Args:
            verify: "hash" to read every byte, or "size" to check only the files' sizes, for a
                folder that was verified before. Both check the weights' shapes.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        _check_references(manifest)
        for name, entry in manifest.files.items():
            _check_file(folder / name, entry, verify)
        try:
            config = AlbertConfig.from_hf(manifest.config)
        except ConfigError as error:
            raise BundleCorruptError(f"{folder / MANIFEST_FILE}, config: {error}") from error
        check_shapes(read_header(folder / WEIGHTS_FILE), needed_shapes(config, manifest.heads))
        return cls(folder=folder, manifest=manifest, config=config)

    @property
    def encoder_file(self) -> Path:
        """The graph from ids to hidden states, for CPUs."""
        return self.folder / ENCODER_FILE

    @property
    def cuda_encoder_file(self) -> Path:
        """The same graph, unrolled for CUDA."""
        return self.folder / CUDA_ENCODER_FILE

    @property
    def tokenizer_file(self) -> Path:
        """The file of the `tokenizers` library."""
        return self.folder / TOKENIZER_FILE

    @property
    def weights_file(self) -> Path:
        """The only file with weights."""
        return self.folder / WEIGHTS_FILE

    def head_file(self, head: str) -> Path:
        """Return the graph of a head of `Manifest.heads`.

        Raises:
            KeyError: the bundle does not have the head.
        """
        return self.folder / self.manifest.heads[head].graph

    def cuda_head_file(self, head: str) -> Path:
        """Return the graph of a head for CUDA, which may be the graph for CPUs."""
        file = self.head_file(head).with_suffix(CUDA_SUFFIX)
        return file if file.name in self.manifest.files else self.head_file(head)


def needed_shapes(config: AlbertConfig, heads: Mapping[str, HeadEntry]) -> dict[str, Shape]:
    """Return the shapes of the weights that the backbone and the heads read, by name."""
    return expected_shapes(config, {head: entry.num_outputs for head, entry in heads.items()})


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a bundle, without checking the files that it lists."""
    file = folder / MANIFEST_FILE
    try:
        content = json.loads(read_small_file(file, _MAX_MANIFEST_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.is_dir():
            raise BundleMissingError(f"{folder} does not exist. Pass a bundle's folder.") from error
        raise BundleMissingError(
            f"{folder} is not a bundle: it has no {MANIFEST_FILE}. Export a bundle with "
            f"`albert-serve export CHECKPOINT {folder}`."
        ) from error
    except OSError as error:
        raise BundleMissingError(f"{file} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise BundleCorruptError(
            f"{file} is not JSON ({error}). Export the bundle again."
        ) from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version not in (2, _FORMAT_VERSION):
        raise BundleError(
            f"{file} has format version {version!r}; this package reads 2 and {_FORMAT_VERSION}. "
            "Install the package's version that wrote it, or export the checkpoint again."
        )
    try:
        manifest = Manifest.model_validate(_from_version_2(content) if version == 2 else content)
        _ = manifest.revision  # fails if a value cannot be written as JSON
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BundleCorruptError(
            f"{file} is not a manifest: {describe_faults(error)}. Export the bundle again."
        ) from error
    return manifest


def _from_version_2(content: dict[str, Any]) -> dict[str, Any]:
    """Convert version 2 of a manifest, in which tasks contain heads, to version 3."""
    heads: dict[str, Any] = {}
    for task, entry in content["tasks"].items():
        quality = content.get("quality", {}).get(task)
        heads[task] = {**entry, "name": entry.get("head"), "quality": quality}
        heads |= {named_head(name): head for name, head in entry.get("heads", {}).items()}
    return {**content, "format_version": _FORMAT_VERSION, "heads": heads}


def file_entry(file: Path) -> FileEntry:
    """Return the size and SHA-256 of a file, read as a stream."""
    return FileEntry(sha256=sha256_of(file), size=file.stat().st_size)


def _check_references(manifest: Manifest) -> None:
    """Check that the manifest lists every file that the service opens."""
    graphs = [entry.graph for entry in manifest.heads.values()]
    for name in (WEIGHTS_FILE, TOKENIZER_FILE, ENCODER_FILE, CUDA_ENCODER_FILE, *graphs):
        if name not in manifest.files:
            raise BundleCorruptError(
                f"{MANIFEST_FILE} does not list the file {name}. Export the bundle again."
            )


def _check_file(file: Path, expected: FileEntry, verify: Verification) -> None:
    if not file.is_file():
        raise BundleMissingError(
            f"{file} does not exist. Copy or export the complete bundle again."
        )
    try:
        size = file.stat().st_size
        sha256 = sha256_of(file) if verify == "hash" and size == expected.size else None
    except OSError as error:
        raise BundleMissingError(f"{file} cannot be read: {error}.") from error
    difference = None
    if size != expected.size:
        difference = f"{size} bytes; the manifest says {expected.size}"
    elif sha256 not in (None, expected.sha256):
        difference = f"SHA-256 {sha256}; the manifest says {expected.sha256}"
    if difference is not None:
        raise BundleCorruptError(f"{file} has {difference}. Copy or export the bundle again.")
