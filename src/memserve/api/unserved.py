"""Paths of OpenAI's reference that no model of this server answers, each with the reason."""

from __future__ import annotations

_REASONS = {
    "embeddings": "This server's models generate text and give no embeddings: use a server of an embedding model",
    "audio": "Audio is not supported: this server's models read and write text",
    "images": "Images are not supported: this server's models read and write text",
    "videos": "Videos are not supported: this server's models read and write text",
    "realtime": "Audio is not supported: this server's models read and write text",
    "moderations": "Moderation is not supported: this server has no model for it",
    "files": "Files are not kept: send texts in the request, or put a document (PUT /v1/documents/ID)",
    "uploads": "Files are not kept: send texts in the request, or put a document (PUT /v1/documents/ID)",
    "batches": "Batches are not supported: send the requests one by one, with a higher `priority` number than others",
    "fine_tuning": "Fine-tuning is not supported",
    "assistants": "Assistants are not supported: use POST /v1/responses",
    "threads": "Threads are not supported: use POST /v1/responses with previous_response_id",
    "vector_stores": "Vector stores are not supported",
}
"""By the first part of the path below ``/v1/``."""


def why_unserved(path: str) -> str | None:
    """Why there is nothing at ``path``; ``None``: it is no path of OpenAI's."""
    below = path.removeprefix("/v1/")
    return None if below == path else _REASONS.get(below.partition("/")[0])
