"""Open encoders, one for each set of weights however many bundles have it.

Heads are small and read the bundle's own pages; what takes memory is the encoder. Bundles that are
exported from one checkpoint, such as one for each task, have the same weights and the same graph.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

from albert_serve.bundle.manifest import CUDA_ENCODER_FILE, ENCODER_FILE, WEIGHTS_FILE, Bundle
from albert_serve.config import AlbertConfig
from albert_serve.runtime.encoders import BucketedEncoder, CpuEncoder, Encoder, cuda_provider
from albert_serve.runtime.ort import cuda_options, encoder_options, open_session
from albert_serve.runtime.prepacking import map_words, packed_encoder
from albert_serve.settings import RuntimeOptions

# More is hardly faster per token on a CPU, and whoever comes next waits for its end.
_MOST_BATCH_TOKENS: Final = {"cpu": 512, "cuda": 16384}
_LEAST_BATCH_TOKENS: Final = 128
# Of the widest activations of a batch on a CPU: past it they leave its caches and swell memory.
_ACTIVATION_BYTES: Final = 8 << 20
_Key: TypeAlias = tuple[str, str, str, RuntimeOptions]


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What runs batches beside each other, each on one thread of the pool.

    Where there are batches enough this is faster than one after another on all threads, for
    nobody waits for the slowest at each operator. Its weights are pages that are there anyway.
    """

    encoder: Encoder
    pool: ThreadPoolExecutor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class OpenEncoder:
    """An encoder, and how it is called.

    Attributes:
        beside: what runs several batches at once, where there is that.
        turn: to be held from a call until what it gave is no longer read.
    """

    encoder: Encoder
    beside: Beside | None = None
    turn: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)


class EncoderPool:
    """The encoders that some engine uses now. Safe to call from many threads at once."""

    def __init__(self) -> None:
        self._open: WeakValueDictionary[_Key, OpenEncoder] = WeakValueDictionary()
        self._lock = threading.Lock()

    def open(self, bundle: Bundle, options: RuntimeOptions, device: str) -> OpenEncoder:
        """The encoder of a bundle, which another bundle of the same weights may have opened.

        Raises:
            BundleCorruptError: the runtime refuses its graph.
        """
        files = bundle.manifest.files
        graph = files[CUDA_ENCODER_FILE if device == "cuda" else ENCODER_FILE]
        key = (files[WEIGHTS_FILE].sha256, graph.sha256, device, options)
        with self._lock:
            found = self._open.get(key)
            if found is None:
                found = self._open[key] = _open(bundle, options, device)
            return found


def best_batch_tokens(config: AlbertConfig, device: str) -> int:
    """The tokens of one encoder call past which more are no faster."""
    most = _MOST_BATCH_TOKENS[device]
    if device != "cpu":
        return most
    fitting = _ACTIVATION_BYTES // (4 * config.ffn_size)
    return max(_LEAST_BATCH_TOKENS, min(most, fitting))


def _open(bundle: Bundle, options: RuntimeOptions, device: str) -> OpenEncoder:
    if device == "cuda":
        session = open_session(
            bundle.cuda_encoder_file, cuda_options(), cuda=cuda_provider(captures=True)
        )
        return OpenEncoder(
            encoder=BucketedEncoder(session=session, hidden_size=bundle.config.hidden_size),
            turn=threading.Lock(),  # its buffers serve one call at a time
        )
    packed = packed_encoder(bundle, options) if options.prepack == "cache" else None
    beside = None
    if packed is not None and options.threads > 1:
        single = _open_cpu(bundle, replace(options, num_threads=1), packed)
        beside = Beside(encoder=single, pool=ThreadPoolExecutor(options.threads))
    encoder = _open_cpu(bundle, options, packed)
    return OpenEncoder(encoder=encoder, beside=beside)


def _open_cpu(bundle: Bundle, options: RuntimeOptions, packed: Path | None) -> CpuEncoder:
    made = encoder_options(options)
    words = None
    if packed is not None:
        name, words = map_words(bundle)
        made.add_initializer(name, words)
    return CpuEncoder(
        session=open_session(packed or bundle.encoder_file, made),
        words=words,
        kept_tokens=best_batch_tokens(bundle.config, "cpu"),
    )
