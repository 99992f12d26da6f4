"""Options that the programs share."""

from __future__ import annotations

import argparse

import pytest
import torch

from training.options.device import parse_device


@pytest.mark.parametrize(("has_gpu", "expected"), [(False, "cpu"), (True, "cuda")])
def test_auto_is_the_gpu_where_there_is_one(
    has_gpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert parse_device("auto") == torch.device(expected)


@pytest.mark.parametrize("name", ["gpu", "cpu:x", "meta", "cuda:99"])
def test_a_device_that_cannot_be_used_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give auto, cpu, cuda") as refused:
        parse_device(name)
    assert str(refused.value).startswith(f"{name!r} cannot be used: ")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300
