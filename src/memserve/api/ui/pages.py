"""``/ui``: the page's files out of the package, its events, and the explanation of one request."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from memserve.api.http.errors import ApiError, echo
from memserve.api.http.middleware import KeyRing
from memserve.api.ui.feed import PageFeed
from memserve.api.ui.snapshot import Viewer
from memserve.api.ui.timelines import Timelines

MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Of every file: scripts and styles of this server alone, and none inside the page."""


class Dashboard:
    """The routes. The files need no key: they hold no data."""

    def __init__(self, feed: PageFeed, timelines: Timelines, api_keys: KeyRing, metrics_keys: KeyRing) -> None:
        self._feed, self._timelines = feed, timelines
        self._api_keys, self._metrics_keys = api_keys, metrics_keys

    def routes(self) -> list[Route]:
        """All below ``/ui``."""
        return [
            Route("/ui", self.get_page),
            Route("/ui/events", self.stream_events),
            Route("/ui/snapshot", self.get_snapshot),
            Route("/ui/trees", self.get_trees),
            Route("/ui/requests/{request_id:path}", self.get_timeline),
            Route("/ui/{name}", self.get_file),
        ]

    def viewer_of(self, authorization: str | None) -> Viewer:
        """Which figures the sender of an ``Authorization`` header may see. Raises :class:`ApiError` 401.

        The key of ``/metrics`` sees what that page shows, and requests of all tenants. An API key sees its tenant's
        requests, and the cluster's figures where ``/metrics`` is open.
        """
        if not self._metrics_keys.is_open:
            try:
                self._metrics_keys.tenant_of(authorization)
                return Viewer(None, sees_cluster=True, names_tenants=True)
            except ApiError:
                pass  # another key: perhaps a tenant's
        return Viewer(self._api_keys.tenant_of(authorization), sees_cluster=self._metrics_keys.is_open)

    async def get_page(self, request: Request) -> Response:
        """``GET /ui``."""
        return static_file("index.html")

    async def get_file(self, request: Request) -> Response:
        """``GET /ui/{name}``: a script, a style or a picture."""
        return static_file(request.path_params["name"])

    async def stream_events(self, request: Request) -> Response:
        """``GET /ui/events``: a snapshot about once a second."""
        viewer = self.viewer_of(request.headers.get("authorization"))
        self._feed.check_room()
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._feed.stream_events(viewer), media_type="text/event-stream", headers=headers)

    async def get_snapshot(self, request: Request) -> Response:
        """``GET /ui/snapshot``: one such event, as JSON."""
        return _json(await self._feed.snapshot_for(self.viewer_of(request.headers.get("authorization"))))

    async def get_trees(self, request: Request) -> Response:
        """``GET /ui/trees``: the prefixes of the last prompts, and their holders."""
        return _json(await self._feed.trees_for(self.viewer_of(request.headers.get("authorization"))))

    async def get_timeline(self, request: Request) -> Response:
        """``GET /ui/requests/{id}``: the timeline of one request, by its own id or that of its answer."""
        viewer, name = self.viewer_of(request.headers.get("authorization")), request.path_params["request_id"]
        entry = self._timelines.find_entry(name, viewer.tenant)
        if entry is None:
            message = f"There is no request {echo(name)!r} among those in flight and those that have ended lately"
            raise ApiError(404, message, param="request_id", code="request_not_found")
        return _json(entry)


@functools.cache
def _files() -> dict[str, bytes]:
    folder = resources.files(__package__ or "") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def static_file(name: str, *, is_recorded: bool = False) -> Response:
    """A file of the page; ``is_recorded``: it plays finished runs. Raises :class:`ApiError` 404 for another name."""
    content, suffix = _files().get(name), name.rpartition(".")[2]
    if content is None or suffix not in MEDIA_TYPES:
        raise ApiError(404, f"Unknown request URL: /ui/{echo(name)}", code="unknown_url")
    if is_recorded:
        content = content.replace(b"<html ", b"<html data-recorded ", 1)
    return Response(content, headers={**HEADERS, "content-type": f"{MEDIA_TYPES[suffix]}; charset=utf-8"})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), headers={"cache-control": "no-store"}, media_type="application/json")
