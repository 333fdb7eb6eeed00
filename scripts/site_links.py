"""A hook of mkdocs: what the pages link to outside of ``docs/`` is not on the site, so it is named there instead.

Headings get the anchors that they have where the repository is shown, so that links between pages work in both places.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def anchor(heading: str, separator: str) -> str:
    """The anchor of a heading, as forges make it: each space a hyphen, other signs gone."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", separator)


def on_config(config: Any) -> Any:
    """Called by mkdocs with its configuration."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = anchor
    return config


def without_outside_links(markdown: str, page: str) -> str:
    """The text of ``page`` (its path below ``docs/``), where links that leave ``docs/`` are names."""

    def named(link: re.Match[str]) -> str:
        place = PurePosixPath("docs", page).parent
        for part in link[2].split("/"):
            place = place.parent if part == ".." else place / part
        if place.parts[:1] == ("docs",):
            return link[0]
        return f"{link[1]}" if str(place) in link[1] else f"{link[1]} (`{place}`)"

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(named, part) for part in parts)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return without_outside_links(markdown, page.file.src_uri)
