"""The encoders of bundles, which compute hidden states from ids and leave them on the device.

An encoder uses nearly all of the memory. Heads are small and read the bundle's pages. Bundles with
equal weights and graphs share an encoder, such as several bundles of one checkpoint.

Shape legend: B sequences, S positions, H hidden size.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from albert_serve.bundle.manifest import CUDA_ENCODER_FILE, ENCODER_FILE, WEIGHTS_FILE, Bundle
from albert_serve.config import AlbertConfig
from albert_serve.runtime.cuda import cuda_provider, own_device
from albert_serve.runtime.ort import cuda_options, encoder_options, open_session
from albert_serve.runtime.prepacking import map_words, packed_encoder
from albert_serve.settings import RuntimeOptions

_Ints = NDArray[np.int64]
_OUTPUT: Final = "hidden_states"
# On a CPU, larger batches are hardly faster per token, and delay the next request.
_MAX_BATCH_TOKENS: Final = {"cpu": 512, "cuda": 16384}
_MIN_BATCH_TOKENS: Final = 128
# Maximum size of a batch's widest activations on a CPU. More would exceed the CPU's caches.
_ACTIVATION_BYTES: Final = 8 << 20
_Key: TypeAlias = tuple[str, str, str, RuntimeOptions]


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """Right-padded sequences, in int64.

    Attributes:
        ids: token ids (B, S).
        types: token types (B, S).
        lengths: number of tokens of each sequence, without padding (B,).
    """

    ids: _Ints
    types: _Ints
    lengths: _Ints

    def graph_inputs(self) -> dict[str, _Ints]:
        """Return the arrays by the names of the graph's inputs."""
        return {"input_ids": self.ids, "token_type_ids": self.types, "lengths": self.lengths}


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """A session of the encoder's graph, which runs each batch in its own shape.

    Attributes:
        session: session of the graph.
        device: name and number of the session's device.
        words: word embeddings that the session reads, which must live as long as the session.
        max_retained_tokens: maximum number of tokens in a run on a CPU whose memory is retained for
            the next run. The memory of a larger run is freed.
    """

    session: ort.InferenceSession
    device: tuple[str, int] = ("cpu", 0)
    words: ort.OrtValue | None = None
    max_retained_tokens: int | None = None

    def run(self, batch: PaddedBatch) -> ort.OrtValue:
        """Return hidden states (B, S, H) on the encoder's device."""
        binding = self.session.io_binding()
        for name, array in batch.graph_inputs().items():
            binding.bind_cpu_input(name, array)
        binding.bind_output(_OUTPUT, *self.device)
        options = ort.RunOptions()
        if self.max_retained_tokens is not None and batch.ids.size > self.max_retained_tokens:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self.session.run_with_iobinding(binding, options)
        return binding.get_outputs()[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class OpenEncoder:
    """An open encoder.

    Several batches run faster on one thread each than one after another on all threads, because
    operators need no barriers. Both sessions share the pages of prepacked weights.

    Attributes:
        encoder: encoder that runs a batch on all threads.
        single: encoder that runs a batch on one thread, or None if weights are not shared.
        threads: threads that run one batch each.
    """

    encoder: Encoder
    single: Encoder | None = None
    threads: ThreadPoolExecutor | None = None


class EncoderPool:
    """The encoders in use. Threads can share a pool."""

    def __init__(self) -> None:
        self._open: WeakValueDictionary[_Key, OpenEncoder] = WeakValueDictionary()
        self._lock = threading.Lock()

    def open(self, bundle: Bundle, options: RuntimeOptions, device: str) -> OpenEncoder:
        """Return the encoder of a bundle, which open bundles with equal weights share."""
        files = bundle.manifest.files
        graph = files[CUDA_ENCODER_FILE if device == "cuda" else ENCODER_FILE]
        key = (files[WEIGHTS_FILE].sha256, graph.sha256, device, options)
        with self._lock:
            encoder = self._open.get(key)
            if encoder is None:
                encoder = self._open[key] = _open(bundle, options, device)
            return encoder


def best_batch_tokens(config: AlbertConfig, device: str) -> int:
    """Return the number of tokens per encoder call above which throughput no longer grows."""
    limit = _MAX_BATCH_TOKENS[device]
    if device != "cpu":
        return limit
    num_cached_tokens = _ACTIVATION_BYTES // (4 * config.ffn_size)
    return max(_MIN_BATCH_TOKENS, min(limit, num_cached_tokens))


def _open(bundle: Bundle, options: RuntimeOptions, device: str) -> OpenEncoder:
    if device == "cuda":
        provider = cuda_provider(options.gpu_mem_limit)
        session = open_session(bundle.cuda_encoder_file, cuda_options(), cuda=provider)
        return OpenEncoder(encoder=Encoder(session=session, device=(device, own_device())))
    packed = packed_encoder(bundle, options) if options.cache_folder else None
    encoder = _open_cpu(bundle, options, packed)
    if packed is None or options.threads == 1:
        return OpenEncoder(encoder=encoder)
    single = _open_cpu(bundle, replace(options, num_threads=1), packed)
    threads = ThreadPoolExecutor(options.threads)
    return OpenEncoder(encoder=encoder, single=single, threads=threads)


def _open_cpu(bundle: Bundle, options: RuntimeOptions, packed: Path | None) -> Encoder:
    session_options = encoder_options(options)
    words = None
    if packed is not None:
        name, words = map_words(bundle)
        session_options.add_initializer(name, words)
    return Encoder(
        session=open_session(packed or bundle.encoder_file, session_options),
        words=words,
        max_retained_tokens=best_batch_tokens(bundle.config, "cpu"),
    )
