"""What travels is all that pretraining imports, and needs no more than a bare machine has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bare_machine import TRAVELLING
from scripts.bare_machine.code import find_code
from scripts.bare_machine.manifest import BareMachineError
from tests.training.support import REPOSITORY


def test_pretraining_on_shards_needs_what_a_bare_machine_has() -> None:
    code = find_code(REPOSITORY, "training.pretrain")
    assert code.needed == ("numpy", "safetensors", "tokenizers", "torch", "tqdm")


def test_all_that_pretraining_imports_is_found() -> None:
    program = (
        "import json, sys, training.pretrain\n"
        "ours = [m.__file__ for n, m in sys.modules.items()"
        " if n.partition('.')[0] in ('training', 'albert_serve')]\n"
        "print(json.dumps(ours))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, check=True
    )
    code = find_code(REPOSITORY, "training.pretrain")
    assert {Path(file) for file in json.loads(done.stdout)} <= set(code.files)
    assert REPOSITORY / "albert_serve" / "service.py" not in code.files
    assert {file.relative_to(REPOSITORY).parts[0] for file in code.files} == {
        "albert_serve",
        "training",
    }


def test_what_runs_there_needs_nothing_but_python() -> None:
    for module in ("scripts.bare_machine.launcher", "scripts.bare_machine.machine"):
        code = find_code(REPOSITORY, module)
        assert code.needed == ()
        names = {file.stem for file in code.files if file.parent.name == "bare_machine"}
        assert names - {"launcher"} <= set(TRAVELLING)


def test_imports_are_followed_wherever_they_are(tmp_path: Path) -> None:
    package = tmp_path / "ours"
    (package / "inner").mkdir(parents=True)
    sources = {
        "__init__": "",
        "main": "from ours import first\nimport json, other.part",
        "first": "def f():\n    from ours.second import x\n    import lazy\n",
        "second": "try:\n    import tried\nexcept ImportError:\n    pass\nimport ours.inner.deep",
        "inner/__init__": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ours.no",
        "inner/deep": "class C:\n    import ours.third",
        "third": "",
        "no": "",
    }
    for name, text in sources.items():
        (package / f"{name}.py").write_text(text)
    code = find_code(tmp_path, "ours.main")
    found = {file.relative_to(package).with_suffix("").as_posix() for file in code.files}
    assert found == sources.keys() - {"no"}
    assert code.needed == ("other",)


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BareMachineError, match=r"has no module training\.pretrain; run this from"):
        find_code(tmp_path, "training.pretrain")
