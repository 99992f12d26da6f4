"""Python clients of the service, sync and async, which need only httpx and pydantic."""

from albert_serve.client.async_client import AsyncAlbertClient
from albert_serve.client.async_exchange import AsyncAnswerStream
from albert_serve.client.sync_client import AlbertClient
from albert_serve.client.sync_exchange import AnswerStream

__all__ = ["AlbertClient", "AnswerStream", "AsyncAlbertClient", "AsyncAnswerStream"]
