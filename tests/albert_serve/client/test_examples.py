"""The scripts of examples/ and the programs of docs/client.md run as they are printed."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.albert_serve.support import ROOT, Running

EXAMPLES = ROOT / "examples"
SCRIPTS = [
    path.stem
    for path in sorted(EXAMPLES.glob("*.py"))
    if '__name__ == "__main__"' in path.read_text() and "from connection" in path.read_text()
]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/client.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_on_a_model_in_this_process(
    script: str,
    bundle_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--local", str(bundle_dir)])
    monkeypatch.delitem(sys.modules, "connection", raising=False)
    runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    assert re.search(r"\d\.\d{2}", capsys.readouterr().out)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs_as_printed(
    number: int, service: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    program = PROGRAMS[number].replace("http://127.0.0.1:3000", service.url)
    exec(compile(program, f"program {number}", "exec"), {})
    assert capsys.readouterr().out.strip()
