"""Python clients of the service, sync and async; they need httpx and pydantic alone."""

from albert_serve.client.clients import AlbertClient, AsyncAlbertClient

__all__ = ["AlbertClient", "AsyncAlbertClient"]
