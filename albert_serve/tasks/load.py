"""The tasks of a bundle."""

from __future__ import annotations

import logging
from dataclasses import replace

from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.bundle.manifest import AdaptiveDepth, Bundle, Manifest
from albert_serve.tasks import TASKS, AnyTask, TaskSetup, open_task
from albert_serve.tasks.text_classification import label_names, resolve_early_exit
from albert_serve.tokenizer import AlbertTokenizer

_logger = logging.getLogger(__name__)


def task_names(manifest: Manifest) -> list[str]:
    """Return the names of a bundle's tasks that have an endpoint.

    Feature extraction needs the encoder and no head, so every bundle has it and no manifest names
    it.
    """
    return [*(name for name in manifest.tasks if name in TASKS), FEATURE_EXTRACTION]


def load_setups(bundle: Bundle, tokenizer: AlbertTokenizer | None = None) -> dict[str, TaskSetup]:
    """Return the setup of each task of the bundle that has an endpoint, by name.

    Args:
        tokenizer: the bundle's, if it has been read.

    Raises:
        BundleError: the bundle's tokenizer cannot be read.
    """
    tokenizer = tokenizer or AlbertTokenizer.from_file(bundle.tokenizer_file)
    common = TaskSetup(
        tokenizer=tokenizer,
        max_positions=bundle.config.max_positions,
        hidden_size=bundle.config.hidden_size,
        num_layers=bundle.config.num_layers,
    )
    setups = dict.fromkeys(task_names(bundle.manifest), common)
    for name, entry in bundle.manifest.tasks.items():
        if name in setups:
            setups[name] = replace(
                common,
                labels=label_names(entry),
                problem_type=entry.problem_type,
                head=entry.default_head,
                heads=entry.heads,
                null_score_diff_threshold=entry.null_score_diff_threshold or 0.0,
                adaptive_depth=entry.adaptive_depth,
                question_head=entry.question_head or "independent",
            )
    return setups


def load_tasks(
    bundle: Bundle, tokenizer: AlbertTokenizer | None = None, *, device: str = "cpu"
) -> dict[str, AnyTask]:
    """Return each task of the bundle that has an endpoint, by name.

    The log says where the device ignores the bundle's default early exit.

    Args:
        tokenizer: the bundle's, if it has been read.
        device: the engine's.

    Raises:
        BundleError: the bundle's tokenizer cannot be read.
    """
    setups = load_setups(bundle, tokenizer)
    for name, setup in setups.items():
        defaults = setup.adaptive_depth or AdaptiveDepth()
        if device == "cuda" and resolve_early_exit(defaults, setup.num_layers) is not None:
            limits = defaults.model_dump(exclude_none=True)
            _logger.warning(
                "%s: the defaults %s of %s have no effect on a GPU: all layers are computed",
                *(bundle.folder, limits, name),
            )
    return {name: open_task(name, on_device(setup, device)) for name, setup in setups.items()}


def on_device(setup: TaskSetup, device: str) -> TaskSetup:
    """Return the setup of a task whose engine runs on a device; one on CUDA cannot stop early."""
    return replace(setup, stops_early=device != "cuda")
