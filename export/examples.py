"""Examples of inputs for the manifest, which the service's page shows."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

from albert_serve.api.wire import validate
from albert_serve.bundle.manifest import MAX_EXAMPLES, TaskExample
from albert_serve.bundle.weights import TaskName
from albert_serve.errors import InvalidInputError
from albert_serve.tasks import TASKS
from export.errors import ExportError
from export.source import read_json_object


def read_examples(file: Path) -> dict[str, list[TaskExample]]:
    """Read a JSON file like `albert_serve/web/examples.json`: for each task a list of examples.

    An example is `{"inputs": ..., "label": ...}`: one item as the task's endpoint takes it, and
    perhaps a few words for it. Other fields are passed over.

    Raises:
        ExportError: the file cannot be read, or an example is none of its task.
    """
    if not file.is_file():
        raise ExportError(f"--examples {file} is not there")
    listed = read_json_object(file)
    return {name: _read_task(f"{file}, {name}", name, items) for name, items in listed.items()}


def check_tasks(examples: Collection[str], tasks: Collection[TaskName]) -> None:
    """Check that the model has the tasks that there are examples of.

    Raises:
        ExportError: it does not.
    """
    missing = [name for name in examples if name not in tasks]
    if missing:
        raise ExportError(
            f"there are examples of {', '.join(missing)}, but the checkpoint has "
            f"{', '.join(tasks)}; leave them out"
        )


def _read_task(place: str, name: str, items: Any) -> list[TaskExample]:
    names = [task for task in get_args(TaskName) if task in TASKS]
    if name not in names:
        raise ExportError(f"{place} is no task with examples; there are {', '.join(names)}")
    if not isinstance(items, list) or not 0 < len(items) <= MAX_EXAMPLES:
        raise ExportError(f"{place} must be a list of 1 to {MAX_EXAMPLES} examples")
    return [_read_one(f"{place}[{number}]", name, item) for number, item in enumerate(items)]


def _read_one(place: str, name: str, item: Any) -> TaskExample:
    try:
        example = validate(TaskExample, item)
        if isinstance(example.inputs, list):
            raise ExportError(f"{place}: inputs is a list; an example is one item")
        validate(TASKS[name].request, {"inputs": example.inputs})
    except InvalidInputError as error:
        raise ExportError(f"{place}: {error}") from error
    return example
