"""Hooks that mkdocs calls while it builds the site (mkdocs.yml, ``hooks``)."""

from __future__ import annotations


def on_page_content(html: str, **_: object) -> str:
    """A docstring says ``as here::`` before lines that are to stay as they are; a page says ``as here:``."""
    return html.replace("::</p>", ":</p>")
