"""Measurement of a bundle on this machine: time to open, memory, speed, and their references.

Measured with the very options that the service would run with. Every measurement is bounded in
time; nothing is changed but, with prepack "cache", the cache that the service would fill itself.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from albert_serve.bundle.manifest import Bundle
from albert_serve.config import AlbertConfig
from albert_serve.doctor.footprint import Footprint, Opening, measure_footprint, open_timed
from albert_serve.doctor.machine import Machine, read_machine
from albert_serve.doctor.memory import read_memory
from albert_serve.doctor.products import Products, measure_products
from albert_serve.doctor.speed import Speed, measure_speeds
from albert_serve.progress import progress_bar
from albert_serve.settings import RuntimeOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The measurements; its attributes are the keys of `albert-serve doctor --json`.

    Attributes:
        folder: the bundle's.
        precision: the bundle's.
        config: the sizes of the model.
        weights_bytes: size of the weight file.
        machine: the properties of the machine.
        device: the bundle's device, "cpu" or "cuda".
        threads: threads of one run.
        spinning: whether threads wait actively.
        prepack: the location of pre-packed weights.
        num_workers: worker processes.
        products: matrix products on the CPU.
        opening_cold: in a fresh process, files dropped from the page cache before; None where that
            cannot be done.
        fills_cache: whether that process packed the weights into the cache, which lacked them.
        opening_warm: with all files in the page cache.
        footprint: one process' memory; None where the system does not tell.
        workers_footprint: that of all workers; None as well where there is one worker.
        speeds: by shape.
    """

    folder: str
    precision: str
    config: AlbertConfig
    weights_bytes: int
    machine: Machine
    device: str
    threads: int
    spinning: bool
    prepack: str
    num_workers: int
    products: Products
    opening_cold: Opening | None
    fills_cache: bool
    opening_warm: Opening
    footprint: Footprint | None
    workers_footprint: Footprint | None
    speeds: list[Speed]


def diagnose(bundle: Bundle, options: RuntimeOptions, num_workers: int = 1) -> Diagnosis:
    """Measure a bundle on this machine; takes seconds, and a minute or two for the largest.

    Args:
        bundle: the bundle to measure.
        options: the runtime options of each worker.
        num_workers: worker processes.

    Raises:
        BundleError: the runtime refuses the bundle.
        EngineError: it cannot be run, or a process that opened it ended.
    """
    with progress_bar(title="matrix products", total=4, unit="steps", is_step=True) as bar:
        products = measure_products(options)
        _step(bar, "memory of a process")
        from_disk = _measure_from_disk(bundle, options)
        _step(bar, "memory of the workers")
        several = from_disk.footprint is not None and num_workers > 1
        workers = measure_footprint(bundle, options, num_workers) if several else None
        _step(bar, "opening it")
        engine, opening_warm = open_timed(bundle.folder, options)
        bar.update()
    peak = products.fp32_gflops_per_s if engine.device == "cpu" else None
    return Diagnosis(
        folder=str(bundle.folder),
        precision=bundle.manifest.precision,
        config=bundle.config,
        weights_bytes=bundle.weights_file.stat().st_size,
        machine=read_machine(),
        device=engine.device,
        threads=options.threads,
        spinning=options.spinning,
        prepack=options.prepack,
        num_workers=num_workers,
        products=products,
        opening_cold=from_disk.opening,
        fills_cache=from_disk.fills_cache,
        opening_warm=opening_warm,
        footprint=from_disk.footprint,
        workers_footprint=workers,
        speeds=measure_speeds(engine, bundle, peak),
    )


def _step(bar: tqdm[Any], name: str) -> None:
    bar.update()
    bar.set_description_str(name, refresh=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class _FromDisk:
    """Measurements of the first process that opens the bundle; see `Diagnosis`."""

    footprint: Footprint | None
    opening: Opening | None
    fills_cache: bool


def _measure_from_disk(bundle: Bundle, options: RuntimeOptions) -> _FromDisk:
    files = _files(bundle, options)
    is_dropped = _drop_from_page_cache(files)
    if read_memory() is None:
        return _FromDisk(footprint=None, opening=None, fills_cache=False)
    footprint = measure_footprint(bundle, options, 1)
    return _FromDisk(
        footprint=footprint,
        opening=footprint.opening[0] if is_dropped else None,
        fills_cache=not set(_files(bundle, options)) <= set(files),
    )


def _files(bundle: Bundle, options: RuntimeOptions) -> list[Path]:
    """Return the bundle's files, and those of the cache if there is one."""
    files = [bundle.folder / name for name in bundle.manifest.files]
    if options.prepack == "cache" and options.cache_folder is not None:
        files += [file for file in options.cache_folder.rglob("*") if file.is_file()]
    return files


def _drop_from_page_cache(files: list[Path]) -> bool:
    """Drop files from the page cache; return whether the system supports that."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # dirty pages are not dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    return True
