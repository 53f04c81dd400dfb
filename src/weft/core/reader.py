"""Python's notation for values, read without evaluating: calls, lists, maps, names, numbers.

A name without quotes is text, `None` is None. This file knows the punctuation; `parse` knows what
the words mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CLOSING", "Call", "Reader", "UnreadableError"]


class UnreadableError(Exception):
    """Why a text cannot be read; `parse` turns it into an error with all five parts."""


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """`name(*values, **options)`"""

    name: str
    values: list[Any] = field(default_factory=list[Any])
    options: dict[str, Any] = field(default_factory=dict[str, Any])


_TOKEN = re.compile(r"""\s*(?: (?P<number>-?\d+)(?!\w) | (?P<name>[^\W\d][\w./-]*)
                           | '(?P<single>[^']*)' | "(?P<double>[^"]*)"
                           | (?P<mark>[()\[\]{},=:@]) | (?P<end>$) )""", re.VERBOSE)

CLOSING = {"(": ")", "[": "]", "{": "}"}
"""Brackets and their closing counterparts."""


class Reader:
    """A position in a text, and what can be read from there; all methods raise UnreadableError."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, Any, int]] = []
        self.next = 0
        at = 0
        while not self.tokens or self.tokens[-1][0] != "end":
            match = _TOKEN.match(text, at)
            if match is None:
                at += len(text[at:]) - len(text[at:].lstrip())
                raise UnreadableError(f"{text[at]!r} at character {at + 1} has no meaning there")
            kind = match.lastgroup or ""
            value: Any = int(match[kind]) if kind == "number" else match[kind]
            quoted = kind in ("single", "double")
            self.tokens.append(("quoted" if quoted else kind, value, match.start(kind)))
            at = match.end()

    # One token at a time.

    def take(self) -> tuple[str, Any]:
        """The next token, as (kind, value); at the end the same token is returned repeatedly."""
        kind, value, _ = self.tokens[self.next]
        self.next += kind != "end"
        return kind, value

    def accept(self, text: str, kind: str = "mark") -> bool:
        """Whether the next token is this one; if so, it is taken."""
        found = self.tokens[self.next][:2] == (kind, text)
        self.next += found
        return found

    def expect(self, mark: str, closing: str = "") -> None:
        """Take the mark that must come next; the caller has seen that it is not `closing`."""
        if not self.accept(mark):
            raise self.unexpected(f"{mark!r} or {closing!r}" if closing else f"{mark!r}")

    def of(self, kind: str, wanted: str) -> Any:
        """The value of the token, which must be of this kind."""
        if self.tokens[self.next][0] != kind:
            raise self.unexpected(wanted)
        return self.take()[1]

    def end(self) -> None:
        """Check that nothing is left."""
        if self.tokens[self.next][0] != "end":
            raise self.unexpected("the end")

    def unexpected(self, wanted: str) -> UnreadableError:
        """The error that says what was found instead."""
        kind, value, at = self.tokens[self.next]
        if kind == "end":
            return UnreadableError(f"it ends where {wanted} is due")
        return UnreadableError(f"{value!r} stands at character {at + 1}, where {wanted} is due")

    # Values.

    def value(self) -> Any:
        """A name, text or number; or a call, list, tuple or map of them."""
        kind, value = self.take()
        if kind in ("number", "quoted"):
            return value
        if kind == "name" and self.accept("("):
            return self._arguments(Call(value))
        if kind == "name":
            return None if value == "None" else value
        if kind == "mark" and value == "[":
            return self.items("]")
        if kind == "mark" and value == "(":
            items = self.items(")")
            only = self.tokens[self.next - 2][:2] != ("mark", ",")
            return items[0] if len(items) == 1 and only else tuple(items)
        if kind == "mark" and value == "{":
            return self._map()
        self.next -= kind != "end"
        raise self.unexpected("a value")

    def items(self, closing: str) -> list[Any]:
        """Values with commas between them, up to the closing bracket."""
        found: list[Any] = []
        while not self.accept(closing):
            if found:
                self.expect(",", closing)
                if self.accept(closing):
                    break
            found.append(self.value())
        return found

    def _arguments(self, call: Call) -> Call:
        while not self.accept(")"):
            if call.values or call.options:
                self.expect(",", ")")
                if self.accept(")"):
                    break
            kind, name, _ = self.tokens[self.next]
            if kind == "name" and self.tokens[self.next + 1][:2] == ("mark", "="):
                self.next += 2
                if name in call.options:
                    raise UnreadableError(f"{name}= is given twice")
                call.options[name] = self.value()
            elif call.options:
                raise self.unexpected("name=")
            else:
                call.values.append(self.value())
        return call

    def _map(self) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        while not self.accept("}"):
            if found:
                self.expect(",", "}")
                if self.accept("}"):
                    break
            key = self.value()
            self.expect(":")
            if not isinstance(key, (str, int)) or key in found:
                raise UnreadableError(f"{key!r} is no name, or there twice")
            found[key] = self.value()
        return found
