"""Writer of a bundle's folder: written under a temporary name, verified, and then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import onnx
import onnxruntime
import torch
from tokenizers import Tokenizer

import albert_serve
from albert_serve.bundle.manifest import (
    CARD_FILE,
    CUDA_ENCODER_FILE,
    CUDA_SUFFIX,
    ENCODER_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Bundle,
    FileEntry,
    Manifest,
    Part,
    Precision,
    TaskExample,
    file_entry,
)
from albert_serve.bundle.sentence_vectors import read_sentence_vectors, write_sentence_vectors
from albert_serve.bundle.weights import TaskName, read_header
from albert_serve.progress import progress
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from export.card import model_card
from export.encoder import build_encoder
from export.errors import ExportError
from export.examples import check_tasks
from export.graph import CUDA_FORM, Compute, Form
from export.heads import build_head
from export.precision import write_weights
from export.quality import MeasuredQuality, check_quality, measure_quality
from export.selection import select_tasks, tasks_with_data
from export.smoothing import largest_inputs
from export.source import (
    HUGGING_FACE_FILES,
    Source,
    read_source,
    read_training,
    with_threshold,
)
from export.verify import (
    MAX_CUDA_SHARE,
    check_parity,
    check_references,
    measure_cuda_parity,
    measure_parity,
    special_ids,
)
from training.conversion.shipped import restore_weights
from training.conversion.source import open_checkpoint
from training.evaluation.real_text import RealData
from training.evaluation.torch_engine import TorchEngine
from training.model.checkpoint import load_checkpoint
from training.model.heads import AlbertForTasks
from training.options.flags import Options, flag
from training.options.values import Finite
from training.system.partial_folder import partial_folder, put_folder_in_place

_TORCH_BATCH_TOKENS: Final = 1024
_CONFIG_FILE: Final = "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """The result of an export.

    Attributes:
        unused: names of the checkpoint's weights that none of its heads reads.
        left_out: tasks of the checkpoint that the bundle has not, and why.
        fp32_bytes: size of the checkpoint's weight file.
    """

    bundle: Bundle
    unused: list[str]
    left_out: dict[str, str]
    fp32_bytes: int


@dataclass(frozen=True, kw_only=True)
class Limits(Options, title="limits"):
    """The limits that a bundle must meet."""

    max_cost: Finite = flag(
        "maximum loss of a task's metric in points, by precision; only significant losses count",
        1.0,
        metavar="POINTS",
    )
    max_difference: Finite = flag(
        "largest difference from torch in fp32, as a share of the largest value",
        1e-4,
        metavar="SHARE",
    )
    max_cuda_difference: Finite | None = flag(
        "largest difference from torch on a GPU, emulated, as a share of the largest value (fp32 "
        "1e-4, fp16 0.06, bf16 0.3)",
        metavar="SHARE",
    )
    force: bool = flag("write the bundle even if --max-cost is exceeded", False)


def export_bundle(
    checkpoint: str | Path,
    target: Path,
    *,
    tasks: Collection[TaskName] = (),
    precision: Precision = "fp32",
    kept_fp32: Collection[Part] = (),
    cuda_precision: Compute = "fp16",
    data: RealData | None = None,
    quality_budget_s: float | None = None,
    limits: Limits | None = None,
    evaluation: Mapping[str, Any] | None = None,
    null_score_diff_threshold: float | None = None,
    examples: Mapping[str, Sequence[TaskExample]] | None = None,
    overwrite: bool = False,
) -> ExportResult:
    """Write a checkpoint as a bundle, atomically.

    Args:
        checkpoint: a folder, or a model of the Hugging Face Hub; see `open_checkpoint`.
        target: the folder to write.
        tasks: those to export; empty for those that the last run trained or that there is data for,
            or for all where the checkpoint does not say what was trained.
        precision: how matrices are stored.
        kept_fp32: parts whose matrices stay fp32.
        cuda_precision: the type that the encoder computes in on CUDA.
        data: real text, on which each task is compared with torch; None: it is not.
        quality_budget_s: the time for that; None for no limit.
        limits: what is refused.
        evaluation: results by name; they stand before those of the checkpoint's
            `evaluation.json`.
        null_score_diff_threshold: of question answering, for the manifest; by default the best F1
            threshold of the results.
        examples: inputs that the service's page shows, by task.
        overwrite: whether a bundle that is at the target is replaced.

    Raises:
        ExportError: the checkpoint cannot be exported, the graphs differ from torch, the precision
            costs a task too much, or the target is there or cannot be written.
        CheckpointError, BundleCorruptError: see `read_source`; CheckpointError also if the
            checkpoint is neither here nor on the Hub.
        ConfigError: it is a model of sentences whose vectors are not computed here.
        VocabError: there is no `tokenizer.json`, and the vocabulary cannot be read.
    """
    target = target.resolve()
    limits = limits or Limits()
    _check_target(Path(checkpoint), target, overwrite)
    with open_checkpoint(checkpoint) as opened, _new_folder(target) as folder:
        source = read_source(opened.folder)
        figures = {**source.evaluation, **(evaluation or {})}
        training, vectors = read_training(opened.folder), read_sentence_vectors(opened.folder)
        source = replace(source, evaluation=figures, training=training)
        source, left_out = select_tasks(source, tasks, tasks_with_data(data))
        source = with_threshold(source, null_score_diff_threshold)
        examples = examples or {}
        check_tasks(examples, source.tasks)
        form = replace(CUDA_FORM, compute=cuda_precision)
        model = load_checkpoint(source.folder, source.num_outputs)
        unused = _write_files(source, folder, model, precision, kept_fp32, form)
        parity, cuda_parity = _compare(source, folder, model, precision, form, limits)
        manifest = Manifest(
            config=source.config.to_hf(),
            tasks=source.tasks,
            precision=precision,
            kept_fp32=sorted(kept_fp32) if precision != "fp32" else [],
            files=_describe_files(folder),
            parity=parity,
            cuda_precision=cuda_precision,
            cuda_parity=cuda_parity,
            evaluation=source.evaluation,
            provenance=_provenance(source, opened.name),
            examples={task: list(examples[task]) for task in source.tasks if task in examples},
            sentence_vectors=vectors,
        )
        _write_manifest(manifest, folder)
        if data is not None:
            measured = _measure_quality(source, folder, model, data, quality_budget_s)
            if not limits.force:
                check_quality(measured, limits.max_cost)
            manifest = manifest.with_quality(
                {task: result.quality for task, result in measured.items()}
            )
            _write_manifest(manifest, folder)
        if vectors is not None and precision == "fp32":  # for sentence-transformers and training
            write_sentence_vectors(vectors, folder, hidden_size=source.config.hidden_size)
        if manifest.evaluation:
            card = model_card(manifest, target.name)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")
        Bundle.open(folder, verify="size")
        put_folder_in_place(folder, target)
        return ExportResult(
            bundle=Bundle.open(target, verify="size"),
            unused=unused,
            left_out=left_out,
            fp32_bytes=source.weights_file.stat().st_size,
        )


def _write_files(
    source: Source,
    folder: Path,
    model: AlbertForTasks,
    precision: Precision,
    kept_fp32: Collection[Part],
    form: Form,
) -> list[str]:
    """Write the tokenizer, weights and graphs; return the weights that no head reads."""
    _write_tokenizer(source, folder)
    if precision == "fp32":
        _copy_hugging_face_files(source, folder)
        _link_or_copy(source.weights_file, folder / WEIGHTS_FILE)
    else:
        largest = largest_inputs(model, special_ids(folder), source.stored)
        write_weights(source, folder / WEIGHTS_FILE, precision, kept_fp32, largest)
    graphs = _write_graphs(source, folder, form)
    check_references(graphs, read_header(folder / WEIGHTS_FILE))
    return sorted(source.stored.keys() - source.needed_names)


def _compare(
    source: Source,
    folder: Path,
    model: AlbertForTasks,
    precision: Precision,
    form: Form,
    limits: Limits,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the differences of the graphs from torch, on the CPU and emulated on CUDA."""
    parity = measure_parity(folder, source.heads, model)
    if precision == "fp32":
        advice = "If the weights are sound, --max-difference raises the limit"
        check_parity(parity, limits.max_difference, advice=advice)
    cuda_parity = _measure_cuda_parity(source, folder, model, precision, form)
    max_share = limits.max_cuda_difference
    if max_share is None:
        max_share = MAX_CUDA_SHARE[form.compute]
    check_parity(
        cuda_parity,
        max_share,
        graphs=f"in {form.compute}, as shares of the largest value, the graphs for CUDA",
        advice=f"nan: a value is too large for {form.compute}; --cuda-precision bf16 or fp32 has "
        "the range; --max-cuda-difference raises the limit",
    )
    return parity, cuda_parity


def _check_target(checkpoint: Path, target: Path, overwrite: bool) -> None:
    """Refuse to replace a folder that is not a bundle, before any work is done."""
    folder = checkpoint.resolve()
    if checkpoint.exists() and target in (folder, *folder.parents):
        raise ExportError(f"{target} holds the checkpoint itself; choose another folder")
    if not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and not (target / MANIFEST_FILE).is_file()):
        raise ExportError(f"{target} exists but is not a bundle. Choose another folder")
    if not overwrite:
        raise ExportError(f"{target} already exists. Use --overwrite to replace it")


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Create a temporary folder next to the target, removed afterwards unless it was renamed."""
    try:
        with partial_folder(target) as folder:
            yield folder
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {error}") from error


def _write_graphs(source: Source, folder: Path, cuda_form: Form) -> list[Path]:
    stored = read_header(folder / WEIGHTS_FILE)
    graphs = {
        ENCODER_FILE: build_encoder(source.config, stored),
        CUDA_ENCODER_FILE: build_encoder(source.config, stored, cuda_form),
    }
    for head, entry in source.heads.items():
        size = entry.num_outputs
        graphs[entry.graph] = cpu_head = build_head(source.config, head, size, stored)
        cuda_head = build_head(source.config, head, size, stored, cuda_form)
        if cuda_head != cpu_head:  # the bundle is in int8
            graphs[str(Path(entry.graph).with_suffix(CUDA_SUFFIX))] = cuda_head
    for name, model in graphs.items():
        onnx.save(model, folder / name)
    return [folder / name for name in graphs]


def _measure_cuda_parity(
    source: Source, folder: Path, model: AlbertForTasks, precision: Precision, form: Form
) -> dict[str, float]:
    """Compare the graphs for CUDA with torch, which has the bundle's own values of the weights."""
    if precision == "fp32":
        return measure_cuda_parity(folder, source.heads, model, form)
    with tempfile.TemporaryDirectory() as restored:
        shutil.copyfile(source.folder / _CONFIG_FILE, Path(restored) / _CONFIG_FILE)
        restore_weights(folder / WEIGHTS_FILE, Path(restored) / WEIGHTS_FILE)
        rounded = load_checkpoint(Path(restored), source.num_outputs)
        return measure_cuda_parity(folder, source.heads, rounded, form)


def _write_manifest(manifest: Manifest, folder: Path) -> None:
    content = manifest.model_dump_json(indent=2, exclude_none=True)
    (folder / MANIFEST_FILE).write_text(content + "\n", encoding="utf-8")


def _measure_quality(
    source: Source, folder: Path, model: AlbertForTasks, data: RealData, budget_s: float | None
) -> dict[str, MeasuredQuality]:
    engine = Engine.open(Bundle.open(folder, verify="size"), RuntimeOptions(device="cpu"))
    reference = TorchEngine(model, max_batch_tokens=_TORCH_BATCH_TOKENS)
    return measure_quality(
        source, folder / TOKENIZER_FILE, reference, engine, data, budget_s=budget_s
    )


def _write_tokenizer(source: Source, folder: Path) -> None:
    """Write the tokenizer as compact JSON, since white space is half of some files."""
    file = source.folder / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise ExportError(f"{file} cannot be read: {error}") from error
    (folder / TOKENIZER_FILE).write_bytes(tokenizer.to_str().encode())
    num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
    if num_ids > source.config.vocab_size:
        raise ExportError(
            f"the tokenizer of {source.folder} has {num_ids} pieces; the model has embeddings for "
            f"{source.config.vocab_size}. They are not of one checkpoint"
        )


def _copy_hugging_face_files(source: Source, folder: Path) -> None:
    """Copy what makes the bundle a checkpoint as well, for transformers and for training."""
    for name in HUGGING_FACE_FILES:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)


def _link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file that every user may read where the file system can, else copy it."""
    is_readable = source.stat().st_mode & 0o444 == 0o444
    try:
        if is_readable:
            os.link(source.resolve(), target)
    except OSError:
        is_readable = False
    if not is_readable:
        shutil.copyfile(source, target)


def _describe_files(folder: Path) -> dict[str, FileEntry]:
    files = sorted(folder.iterdir())
    return {file.name: file_entry(file) for file in progress(files, title="hashing", unit="files")}


def _provenance(source: Source, checkpoint: str) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint,
        "albert_serve": albert_serve.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "torch": str(torch.__version__),
        "training": source.training,
    }
