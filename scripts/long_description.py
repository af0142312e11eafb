"""README.md as the description of the built package, where links relative to the repository lead nowhere.

Hatchling calls this when it builds. With the address of the repository in `pyproject.toml`, under
``[tool.hatch.metadata.hooks.custom]``, as in ``repository = "https://github.com/OWNER/NAME"``, relative links and
pictures become absolute. Without one, links become their text, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?P<path>(?!https?:|mailto:|#)[^()\s]+)\)")


class LongDescription(MetadataHookInterface):
    """Fills in ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description of the package."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        described = with_absolute_links(text, self.config.get("repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": described}


def with_absolute_links(text: str, repository: str | None) -> str:
    """A page of the repository's root as it can be read elsewhere.

    Args:
        text: Markdown.
        repository: the address of the repository on its code host, or None if it has none.
    """

    def replaced(link: re.Match[str]) -> str:
        if repository is None:
            return "" if link["picture"] else link["text"]
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository.rstrip('/')}/{kind}/main/{link['path']})"

    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)  # code stays as it is
    parts[::2] = [RELATIVE_LINK.sub(replaced, part) for part in parts[::2]]
    return re.sub(r"\n{3,}", "\n\n", "".join(parts)) if repository is None else "".join(parts)
