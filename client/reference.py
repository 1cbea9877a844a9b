"""Prepares docstrings for the reference: roles of reStructuredText become code. mkdocs.yml loads the file."""

import re
from typing import Any, Final

import griffe

_ROLE: Final = re.compile(r":(?:class|meth|mod|func|data|attr):`~?([^`]*)`")


class Roles(griffe.Extension):
    """Replaces roles such as ``:meth:`wait```, which Markdown does not know."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value).replace("``", "`")
