"""The parts of README that the code makes; `python -m support.readme` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

from ceilingd import config_load

README = Path(__file__).parents[2] / "README.md"
_SETTINGS = re.compile(r"(<!-- settings: begin -->\n).*?(<!-- settings: end -->)", re.DOTALL)


def generated(text: str) -> str:
    """`text` with its generated parts made anew."""
    text, count = _SETTINGS.subn(lambda match: f"{match[1]}\n{config_load.settings_markdown()}\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"README.md has {count} settings tables between markers; one is wanted")
    return text


if __name__ == "__main__":
    README.write_text(generated(README.read_text()))
