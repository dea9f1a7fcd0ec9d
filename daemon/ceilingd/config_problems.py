"""What is wrong with a configuration, in one sentence each, in the words of the place where it was written. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

Location = tuple[str | int, ...]
VALUE_LIMIT_CHARACTERS = 80

_MUST = {
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of a sensible size",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "path_type": "must be a path in quotes",
    "tuple_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
}
"""By pydantic's error type, which is stable, unlike its messages."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One origin of values: the flags, the environment, or the file."""

    kind: str
    values: Mapping[str, Any]
    path: str = ""
    """Of the file."""
    spelled: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    """The flag or variable by the key that it sets."""

    def depth(self, loc: Location) -> int:
        """How many steps of `loc` lead to something in this layer."""
        here: Any = self.values
        for steps, step in enumerate(loc):
            inside = isinstance(here, dict) and step in here
            if not inside and not (isinstance(here, list) and isinstance(step, int) and step < len(here)):
                return steps
            here = here[step]
        return len(loc)

    def name(self, loc: Location) -> str:
        """`/etc/ceilingd.toml: links.grace_seconds`, `CEILINGD_LINKS__GRACE_SECONDS` or `--links.grace-seconds`."""
        if not self.spelled:
            return f"{self.path}: {_dotted(loc)}" if self.path else _dotted(loc)
        for length in range(len(loc), 0, -1):
            spelled = self.spelled.get(tuple(str(step) for step in loc[:length]))
            if spelled is not None:
                rest = _dotted(loc[length:])
                return spelled + (rest if not rest or rest.startswith("[") else f".{rest}")
        return _dotted(loc)


def describe(error: ErrorDetails, layers: Sequence[Layer], model: type[BaseModel]) -> str:
    """One sentence for one of pydantic's errors. `layers`: the strongest first; `model`: what was validated."""
    loc: Location = error["loc"]
    layer = max(layers, key=lambda candidate: candidate.depth(loc))
    kind = error["type"]
    name = layer.name(loc)
    if kind == "extra_forbidden":
        return f"{name} is an unknown key{nearest(str(loc[-1]), _keys_at(model, loc[:-1]))}"
    if kind == "missing":
        return f"{name} is missing"
    context = error.get("ctx", {})
    if kind == "private":
        return f"{name} {context['sentence']}"
    if loc == ("servers",) and kind == "tuple_type":
        return f"{name} must be a list of tables: in the file [[servers]], elsewhere a JSON list"
    must = str(context["error"]) if kind == "value_error" else _MUST.get(kind, error["msg"]).format(**context)
    return f"{name} is {_shown(error['input'])}, but {must}"


def nearest(word: str, valid: Iterable[str], prefix: str = "") -> str:
    """`; did you mean X?`, or the valid words where none is near and they are few. `prefix` is shown before the word."""
    valid = list(valid)
    by_folded = {candidate.lower().replace("-", "_"): candidate for candidate in valid}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), by_folded, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {prefix}{by_folded[close[0]]}?"
    if 0 < len(valid) <= 8:
        return f"; known here: {', '.join(valid)}"
    return "; `ceilingd run --help` lists all"


def _keys_at(model: type[BaseModel], loc: Location) -> list[str]:
    """The valid keys of the table at `loc`."""
    here: Any = model
    for step in loc:
        if isinstance(here, type) and issubclass(here, BaseModel):
            by_key = {str(inner.validation_alias or name): inner for name, inner in here.model_fields.items()}
            here = by_key[str(step)].annotation
        else:  # the element of a list or of a table with free keys
            here = next(
                argument for argument in get_args(here) if isinstance(argument, type) and issubclass(argument, BaseModel)
            )
    return [str(inner.validation_alias or name) for name, inner in here.model_fields.items()]


def _dotted(loc: Location) -> str:
    text = ""
    for step in loc:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            bare = step.replace("_", "").replace("-", "")
            key = step if bare.isascii() and bare.isalnum() else _quoted(step)
            text += f".{key}" if text else key
    return text


def _shown(value: object) -> str:
    """The value as people write it: short, on one line, never the inside of a table or list."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)[:VALUE_LIMIT_CHARACTERS]


def _quoted(text: str) -> str:
    cut = text if len(text) <= VALUE_LIMIT_CHARACTERS else text[:VALUE_LIMIT_CHARACTERS] + "..."
    # Printable text stays readable in any script; the rest is escaped, as a terminal would obey it.
    return json.dumps(cut, ensure_ascii=not cut.isprintable())
