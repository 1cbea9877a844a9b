"""The names of a replay: ids that the replayed release generates anew, in place of the recorded ones."""

import re
from collections.abc import Iterator
from typing import Final, TypeAlias

from google.protobuf.message import Message

_ID: Final = re.compile(r"(?:[a-z]{1,8}-)?[0-9a-f]{12,32}")

Value: TypeAlias = "Message | str"


class Names:
    """Replaces ids in recorded messages. Both ids have the same length, so all others of the bytes stay."""

    def __init__(self) -> None:
        self._names: dict[bytes, bytes] = {}

    def learn(self, recorded: Message, present: Message) -> None:
        """Pairs the ids that both messages have in the same places. A known id stays as it is."""
        for old, new in _pairs(recorded, present):
            if old != new and len(old) == len(new) and _ID.fullmatch(old) and _ID.fullmatch(new):
                self._names.setdefault(old.encode(), new.encode())

    def replaced(self, content: bytes) -> bytes:
        """A recorded message with the present ids."""
        if not self._names:
            return content
        found = re.compile(b"|".join(map(re.escape, self._names)))
        return found.sub(lambda match: self._names[match[0]], content)


def _pairs(recorded: Message, present: Message) -> Iterator[tuple[str, str]]:
    """The texts in the same places of two messages of one type."""
    values = {field.name: value for field, value in present.ListFields()}
    for field, old in recorded.ListFields():
        new = values.get(field.name)
        many = field.message_type is not None and field.message_type.GetOptions().map_entry
        if new is None or many:
            continue
        both = zip(old, new, strict=False) if field.is_repeated else [(old, new)]
        for one, other in both:
            if isinstance(one, Message):
                yield from _pairs(one, other)
            elif isinstance(one, str):
                yield one, other
