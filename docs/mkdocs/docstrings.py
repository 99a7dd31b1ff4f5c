"""Markdown made from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

PARTS = ("Args", "Attributes", "Returns", "Raises")


def found(path: str) -> Any:
    """The object at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def body(thing: Any) -> str:
    """A docstring up to its first list of arguments or the like."""
    return re.split(rf"^(?:{'|'.join(PARTS)}):$", inspect.getdoc(thing) or "", maxsplit=1, flags=re.M)[0].strip()


def lists(thing: Any) -> dict[str, list[tuple[str, str]]]:
    """The lists of a docstring: for each, (names, text) of its entries."""
    pieces = re.split(rf"^({'|'.join(PARTS)}):$", inspect.getdoc(thing) or "", flags=re.M)[1:]
    parts = {}
    for title, text in zip(pieces[::2], pieces[1::2], strict=True):
        entries = re.split(r"^    (?=\S)", text, flags=re.M)[1:]
        parts[title] = [tuple(" ".join(entry.split()).partition(": ")[::2]) for entry in entries]
    return parts


def arguments(cls: type) -> dict[str, str]:
    """The meaning of each argument of a class, from its docstring and those of the classes it derives from."""
    texts: dict[str, str] = {}
    for base in cls.__mro__:
        for names, text in lists(base).get("Args", []):
            if not text.startswith("see `"):  # which points to one of the classes that follow
                texts |= {name: text.rstrip(".") for name in names.split(", ") if name not in texts}
    return texts


class Annotation(str):
    """An annotation that is shown without quotes."""

    __repr__ = str.__str__


def signature(name: str, thing: Any) -> str:
    """The signature of a function, or of a class's constructor, on several lines if it is long."""
    full = inspect.signature(thing)
    shown_as = [
        p.replace(annotation=Annotation(p.annotation)) if isinstance(p.annotation, str) else p
        for p in full.parameters.values()
        if p.name != "self"
    ]
    back = Annotation(full.return_annotation) if isinstance(full.return_annotation, str) else full.return_annotation
    if isinstance(thing, type):
        back = inspect.Signature.empty
    line = name + str(full.replace(parameters=shown_as, return_annotation=back))
    if len(line) > 88:
        bare = [str(full.replace(parameters=[p], return_annotation=inspect.Signature.empty))[1:-1] for p in shown_as]
        star = next((k for k, p in enumerate(shown_as) if p.kind is p.KEYWORD_ONLY), None)
        bare = [text.removeprefix("*, ") for text in bare]
        if star is not None:
            bare.insert(star, "*")
        line = f"{name}(\n    " + ",\n    ".join(bare) + f",\n){line[line.rindex(')') + 1 :]}"
    return f"```python\n{line}\n```"


def api(path: str, shown_name: str = "") -> str:
    """A function, or a class with its public methods, from signature and docstring."""
    thing, name = found(path), shown_name or path
    text = [f"### {name}\n", signature(name.rpartition(".")[2], thing), "", documented(thing)]
    if isinstance(thing, type):
        for own, member in vars(thing).items():
            if not own.startswith("_") and inspect.getdoc(member):
                if isinstance(member, property):
                    text.append(f"#### {own}\n")
                elif inspect.isfunction(member):
                    text += [f"#### {own}\n", signature(own, member), ""]
                else:
                    continue
                text.append(documented(member))
    return "\n".join(text)


def documented(thing: Any) -> str:
    parts = [body(thing), ""]
    for title, entries in lists(thing).items():
        parts += [f"**{title}**\n", *(f"- `{names}`: {text}" if text else f"- {names}" for names, text in entries), ""]
    return "\n".join(parts)
