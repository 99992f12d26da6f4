"""Python clients of the service, sync and async; they need only httpx and pydantic."""

from albert_serve.client.clients import AlbertClient, AsyncAlbertClient

__all__ = ["AlbertClient", "AsyncAlbertClient"]
