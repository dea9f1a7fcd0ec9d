"""Text from outside, made fit to be shown."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with control, format (bidirectional too) and other unprintable characters as escapes; the rest stays.

    >>> printable("café \\x1b[31m\\u202e")
    'café \\\\x1b[31m\\\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
