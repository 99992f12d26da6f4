"""The body of a reply: decoded as it arrives, and never larger than the client allows."""

from __future__ import annotations

import zlib
from typing import Final

import httpx

from albert_serve.errors import RequestError

# As much as a service's answers may take of its memory (docs/security.md).
MAX_REPLY_BYTES: Final = 64 << 20
ACCEPTED_ENCODING: Final = "gzip"
_GZIP_WINDOW: Final = 31


class ReplyBody:
    """Collects the body of one reply, plain or in gzip.

    httpx decodes each part that arrives as a whole, which a few kilobytes of gzip can make a
    thousand times larger; here no more is decoded than may be kept.

    Args:
        response: the reply, of which nothing was read.
        max_bytes: the limit of the decoded body, and of what is sent of it.

    Raises:
        RequestError: the reply has another encoding.
    """

    def __init__(self, response: httpx.Response, max_bytes: int) -> None:
        url = str(response.url)
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if response.is_stream_consumed:  # a transport of the caller's gave it whole, and decoded
            encoding = "identity"
        if encoding not in ("identity", ACCEPTED_ENCODING):
            raise RequestError(
                f"{url} replied in the encoding {encoding!r}; only {ACCEPTED_ENCODING} was asked "
                "for: what is between the client and the service changes replies"
            )
        self._url = url
        self._max_bytes = max_bytes
        self._decoder = None if encoding == "identity" else zlib.decompressobj(_GZIP_WINDOW)
        self._num_sent = 0
        self._content = bytearray()
        if response.is_stream_consumed:
            self.add(response.content)

    @property
    def content(self) -> bytes:
        """What has been decoded."""
        return bytes(self._content)

    def add(self, sent: bytes) -> None:
        """Decode a part of the body.

        Raises:
            RequestError: the body is over the limit, or damaged.
        """
        self._num_sent += len(sent)
        self._content += sent if self._decoder is None else self._decode(sent)
        if max(self._num_sent, len(self._content)) > self._max_bytes:
            raise RequestError(
                f"the reply of {self._url} is over {self._max_bytes} bytes; ask for less at once "
                "(fewer inputs, a smaller top_k), or raise max_reply_bytes"
            )

    def _decode(self, sent: bytes) -> bytes:
        assert self._decoder is not None
        try:
            # One byte more than is allowed shows that there is more.
            num_free = self._max_bytes + 1 - len(self._content)
            return self._decoder.decompress(sent, num_free)
        except zlib.error as error:
            raise RequestError(f"the reply of {self._url} is damaged: {error}") from error
