"""The export of a checkpoint as a bundle.

exported = export(ExportConfig(checkpoint="runs/mine/best", bundle="bundles/mine"))
with AlbertClient.local(exported.bundle.folder) as albert:
    ...
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from albert_serve.api.wire import validate
from albert_serve.bundle.manifest import (
    CARD_FILE,
    MAX_EXAMPLES,
    Bundle,
    Manifest,
    TaskExample,
)
from albert_serve.bundle.sentence_vectors import read_sentence_vectors, write_sentence_vectors
from albert_serve.bundle.weights import TaskName, is_task
from albert_serve.errors import InvalidInputError
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import TASKS
from albert_serve.tokenizer import AlbertTokenizer
from export.bundle import (
    check_target,
    describe_files,
    measure_parity,
    new_folder,
    provenance,
    write_files,
    write_manifest,
)
from export.card import model_card
from export.config import ExportConfig as ExportConfig
from export.config import ExportError
from export.labelled import LabelledData, read_labelled_data, tasks_with_data
from export.quality import Comparison, check_quality, compare
from export.selection import select_tasks
from export.source import Source, read_json_object, read_source, with_threshold
from training.conversion.source import open_checkpoint
from training.model.checkpoint import load_checkpoint
from training.model.heads import AlbertForTasks
from training.tasks.engine import TorchEngine

_TORCH_BATCH_TOKENS: Final = 1024
# Minimum width of the column of names in the summary.
_MIN_WIDTH: Final = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """The result of an export.

    Attributes:
        bundle: bundle in its final folder.
        unused: names of the checkpoint's weights that no head reads.
        omitted: reason for each task of the checkpoint that the bundle lacks.
        fp32_bytes: size of the checkpoint's weights file in bytes.
        comparison: comparison of the bundle's answers with torch's.
    """

    bundle: Bundle
    unused: list[str]
    omitted: dict[str, str]
    fp32_bytes: int
    comparison: Comparison


def export(config: ExportConfig) -> ExportResult:
    """Write a checkpoint as a bundle, atomically.

    Raises:
        ExportError: the checkpoint cannot be exported, the graphs or answers differ too much from
            torch, or the target exists or cannot be written.
        CheckpointError, BundleError: the checkpoint is damaged, or neither a folder nor on the Hub.
        ConfigError: the checkpoint is an embedding model of an unsupported form.
        VocabError: the checkpoint has no `tokenizer.json`, and its vocabulary cannot be read.
        CorpusError: data cannot be read.
    """
    target = Path(config.bundle).resolve()
    check_target(Path(config.checkpoint), target, config.overwrite)
    with open_checkpoint(config.checkpoint) as opened, new_folder(target) as folder:
        source, omitted = _read_selected(config, opened.folder)
        vectors = read_sentence_vectors(opened.folder)
        labelled = read_labelled_data(config, source) if config.quality else {}
        model = load_checkpoint(source.folder, source.num_outputs)
        unused = write_files(source, folder, model, config)
        parity, cuda_parity = measure_parity(source, folder, model, config)
        manifest = Manifest(
            config=source.config.to_hf(),
            heads=source.heads,
            precision=config.precision,
            kept_fp32=sorted(config.keep_fp32) if config.precision != "fp32" else [],
            files=describe_files(folder),
            parity=parity,
            cuda_precision=config.cuda_precision,
            cuda_parity=cuda_parity,
            evaluation=source.evaluation,
            provenance=provenance(source, opened.name),
            examples=source.examples,
            sentence_vectors=vectors,
        )
        comparison = Comparison()
        if config.quality:
            bundle = Bundle(folder=folder, manifest=manifest, config=source.config)
            comparison = _compare(source, bundle, model, labelled, config)
            heads = {
                head: entry.model_copy(update={"quality": comparison.quality.get(head)})
                for head, entry in source.heads.items()
            }
            manifest = manifest.model_copy(update={"heads": heads})
        write_manifest(manifest, folder)
        # sentence-transformers reads only fp32 weights.
        if vectors is not None and config.precision == "fp32":
            write_sentence_vectors(vectors, folder, hidden_size=source.config.hidden_size)
        if manifest.evaluation:
            card = model_card(manifest, target.name)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")
        bundle = Bundle.open(folder, verify="size")
        fp32_bytes = source.weights_file.stat().st_size
    return ExportResult(
        bundle=replace(bundle, folder=target),
        unused=unused,
        omitted=omitted,
        fp32_bytes=fp32_bytes,
        comparison=comparison,
    )


def _read_selected(config: ExportConfig, folder: Path) -> tuple[Source, dict[str, str]]:
    """Return the checkpoint with the tasks and settings of the bundle, and the omitted tasks."""
    source = read_source(folder)
    if (file := config.evaluation) is not None and not file.is_file():
        raise ExportError(f"--evaluation {file} does not exist.")
    results = read_json_object(config.evaluation) if config.evaluation else {}
    source = replace(source, evaluation={**source.evaluation, **results})
    source, omitted = select_tasks(source, config.tasks, tasks_with_data(config))
    source = with_threshold(source, config.null_score_diff_threshold, results)
    examples = source.examples
    if config.examples is not None:
        examples = read_examples(config.examples, source.tasks)
    examples = {task: examples[task] for task in source.tasks if task in examples}
    return replace(source, examples=examples), omitted


def read_examples(file: Path, tasks: Collection[TaskName]) -> dict[str, list[TaskExample]]:
    """Read a JSON file with a list of examples per task, like `albert_serve/web/examples.json`.

    An example is `{"inputs": ..., "label": ...}`. `inputs` is one item for the task's endpoint, and
    `label` is an optional short name. Other fields are ignored.
    """
    if not file.is_file():
        raise ExportError(f"--examples {file} does not exist.")
    examples: dict[str, list[TaskExample]] = {}
    for name, items in read_json_object(file).items():
        if not is_task(name) or name not in tasks:
            raise ExportError(
                f"{file} has examples of {name}, but the bundle has {', '.join(tasks)}. "
                "Remove these examples."
            )
        if not isinstance(items, list) or not 0 < len(items) <= MAX_EXAMPLES:
            raise ExportError(f"{file}: {name} must be a list of 1 to {MAX_EXAMPLES} examples.")
        examples[name] = [
            _read_example(f"{file}: {name}[{index}]", name, item)
            for index, item in enumerate(items)
        ]
    return examples


def _read_example(location: str, name: TaskName, item: object) -> TaskExample:
    try:
        example = validate(TaskExample, item)
        if isinstance(example.inputs, list):
            raise ExportError(f"{location}: inputs is a list. An example must be one item.")
        validate(TASKS[name].request, {"inputs": example.inputs})
    except InvalidInputError as error:
        raise ExportError(f"{location}: {error}") from error
    return example


def _compare(
    source: Source,
    bundle: Bundle,
    model: AlbertForTasks,
    labelled: Mapping[str, LabelledData],
    config: ExportConfig,
) -> Comparison:
    """Compare the bundle's answers with torch's."""
    tokenizer = AlbertTokenizer.from_file(bundle.tokenizer_file)
    engine = Engine.open(bundle, RuntimeOptions(device="cpu"))
    reference = TorchEngine(model, max_batch_tokens=_TORCH_BATCH_TOKENS)
    comparison = compare(source, tokenizer, reference, engine, labelled, config.text)
    if not config.force:
        check_quality(comparison, config.max_cost)
    return comparison


def report(exported: ExportResult) -> None:
    """Print the files, the measurements and the omitted tasks."""
    if exported.unused:
        names = ", ".join(exported.unused)
        print(f"warning: no head reads these weights of the checkpoint: {names}", file=sys.stderr)
    for task, reason in exported.omitted.items():
        print(f"{task} is omitted: {reason}.", file=sys.stderr)
    if not exported.bundle.manifest.tasks:
        print("The bundle has no head, so it only computes embeddings.", file=sys.stderr)
    print(_summarize(exported))


def _summarize(exported: ExportResult) -> str:
    """Return a table of sizes and differences."""
    manifest = exported.bundle.manifest
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    graphs = sum(size for name, size in sizes.items() if name.endswith(".onnx"))
    total = sum(sizes.values())
    fraction = total / exported.fp32_bytes
    width = max(_MIN_WIDTH, *map(len, (*sizes, *manifest.parity)))
    return "\n".join(
        [
            f"{exported.bundle.folder} ({manifest.precision})",
            *(f"  {name:<{width}} {size:>14,} bytes" for name, size in sizes.items()),
            f"  {'graphs':<{width}} {graphs:>14,} bytes, without weights",
            f"  {'all':<{width}} {total:>14,} bytes, {fraction:.3f} of the fp32 weights",
            "largest difference from torch, as a fraction of the largest value",
            *(f"  {name:<{width}} {value:>14.1e}" for name, value in manifest.parity.items()),
            f"the same for CUDA in {manifest.cuda_precision}, emulated on the CPU",
            *(f"  {name:<{width}} {value:>14.1e}" for name, value in manifest.cuda_parity.items()),
            *_summarize_comparison(exported.comparison, width),
        ]
    )


def _summarize_comparison(comparison: Comparison, width: int) -> Iterator[str]:
    if comparison.measurements:
        yield "metric on labelled data, in percent: in torch, from the bundle"
    for head, quality in comparison.quality.items():
        percents = f"{quality.torch:.2f} {quality.bundle:.2f}"
        yield f"  {head:<{width}} {percents:>14} {quality.metric} ({quality.count:,})"
    if comparison.differences:
        yield f"mean difference of probabilities from torch, on {', '.join(comparison.texts)}"
    for head, difference in comparison.differences.items():
        yield f"  {head:<{width}} {difference:>14.4f}"
