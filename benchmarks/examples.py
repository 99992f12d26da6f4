"""A bundle's replies to the page's examples, as Markdown for its model card.

The examples are fixed (`albert_serve/web/examples.json`): none was chosen by what a model replies.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from albert_serve.bundle.manifest import Bundle
from albert_serve.default_bundle import shipped_bundle
from albert_serve.runtime.engine import Engine
from albert_serve.tasks import TASKS, Task, Work, prepare_request
from albert_serve.tasks.load import load_tasks
from training.errors import report_errors
from training.system.command_line import make_parser

_EXAMPLES: Final = """examples:
  python -m benchmarks.examples
  python -m benchmarks.examples bundles/mine
"""
_HEADINGS: Final = ("task", "text", "reply", "expected", "")
_TOP_K: Final = 3


def _read_examples() -> dict[str, list[dict[str, Any]]]:
    """Return the page's examples by task: `inputs`, `expected`, and for most a `label`."""
    file = resources.files("albert_serve.web") / "examples.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _rows(bundle: Bundle) -> Iterator[tuple[str, ...]]:
    engine, tasks = Engine.open(bundle), load_tasks(bundle)
    for name, examples in _read_examples().items():
        if name not in tasks:
            continue
        for example in examples:
            reply, is_right = _REPLIES[name](engine, tasks[name], example)
            mark = {True: "right", False: "wrong", None: ""}[is_right]
            yield name, _text(example["inputs"]), reply, _expected(example["expected"]), mark


def _ask(engine: Engine, name: str, task: Task, inputs: Any, **parameters: Any) -> Any:
    request = TASKS[name].request.model_validate({"inputs": inputs, "parameters": parameters})
    work = Work(prepare_request(task, request))
    while work.inputs:
        work.take(engine.run(work.inputs))
    return work.answers[0]


def _fill_mask(engine: Engine, task: Task, example: dict[str, Any]) -> tuple[str, bool | None]:
    answers = _ask(engine, "fill-mask", task, example["inputs"], top_k=_TOP_K)
    masks = answers if isinstance(answers[0], list) else [answers]
    reply = "; ".join(
        ", ".join(f"{each.token_str} ({each.score:.0%})" for each in mask) for mask in masks
    )
    expected = example["expected"]
    return reply, None if expected is None else masks[0][0].token_str in expected


def _classify(engine: Engine, task: Task, example: dict[str, Any]) -> tuple[str, bool | None]:
    best = _ask(engine, "text-classification", task, example["inputs"])[0]
    return f"{best.label} ({best.score:.0%})", best.label == example["expected"]


def _find(engine: Engine, task: Task, example: dict[str, Any]) -> tuple[str, bool | None]:
    answer = _ask(engine, "question-answering", task, example["inputs"])
    return answer.answer, answer.answer in example["expected"]


def _order(engine: Engine, task: Task, example: dict[str, Any]) -> tuple[str, bool | None]:
    best = _ask(engine, "sentence-order", task, example["inputs"], reorder=True)
    return _expected(best.best_order), best.best_order == example["expected"]


_REPLIES: Final = {
    "fill-mask": _fill_mask,
    "text-classification": _classify,
    "question-answering": _find,
    "sentence-order": _order,
}


def _text(inputs: Any) -> str:
    if isinstance(inputs, str):
        return inputs
    if "question" in inputs:
        return f"{inputs['question']} ({inputs['context']})"
    return " ".join(f"{number}. {text}" for number, text in enumerate(inputs["sentences"]))


def _expected(expected: Any) -> str:
    if isinstance(expected, list | tuple):
        return ", ".join(map(str, expected))
    return expected or ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the replies of a bundle; returns the exit status."""
    parser = make_parser("benchmarks.examples", __doc__, _EXAMPLES)
    parser.add_argument("bundle", type=Path, nargs="?", default=shipped_bundle())
    options = parser.parse_args(arguments)

    def run() -> int:
        rows = [_HEADINGS, tuple("---" for _ in _HEADINGS), *_rows(Bundle.open(options.bundle))]
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
        return 0

    return report_errors(run)


if __name__ == "__main__":
    sys.exit(main())
