"""Writes the reference of the client API, docs/reference/api.md, from the comments of the protos."""

from collections.abc import Iterable, Iterator
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

PACKAGE: Final = "leasehold.v1"
_INTRODUCTION: Final = """\
# API reference

This page is generated from the comments of the protos by `make protos`. [api.md](../api.md) says how a client
connects, and how lists, filters and watches work. [errors.md](../errors.md) has the reasons of refusals.

The package of all names is `leasehold.v1`. The wheel has the same descriptions as a `FileDescriptorSet`, with
comments and imports, in `leasehold/descriptors.binpb`.
"""
_FIELD: Final = FieldDescriptorProto
_SCALARS: Final = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()
}
# Numbers of fields in descriptor.proto, of which a path to a comment consists.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS = 2, 3, 4
_METHODS = _VALUES = 2

Path = tuple[int, ...]


class _Comments:
    """The comments of a file, by the path of what they describe."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._by_path = {
            tuple(one.path): " ".join(one.leading_comments.split()) for one in file.source_code_info.location
        }

    def __getitem__(self, path: Path) -> str:
        return self._by_path.get(path, "")


def page(descriptors: FileDescriptorSet) -> str:
    """The reference as Markdown: services, then messages and enums by name.

    Args:
        descriptors: All files, with comments.
    """
    files = [file for file in descriptors.file if file.package == PACKAGE]
    services, messages, enums = [], [], []
    for file in files:
        comments = _Comments(file)
        for number, service in enumerate(file.service):
            path = (_SERVICES, number)
            methods = _methods(service.method, comments, path)
            services.append("\n".join([f"### {service.name}\n", f"{comments[path]}\n", *methods]))
        for number, message in enumerate(file.message_type):
            messages += _message(message, comments, (_MESSAGES, number), "")
        for number, enum in enumerate(file.enum_type):
            enums.append(_enum(enum, comments, (_ENUMS, number), ""))
        for number, message in enumerate(file.message_type):
            for inner, enum in enumerate(message.enum_type):
                path = (_MESSAGES, number, _NESTED_ENUMS, inner)
                enums.append(_enum(enum, comments, path, f"{message.name}."))
    parts = [_INTRODUCTION]
    for heading, texts in (("Services", services), ("Messages", messages), ("Enums", enums)):
        parts += [f"## {heading}\n", *sorted(texts)]
    return "\n".join(parts)


def _methods(methods: Iterable[MethodDescriptorProto], comments: _Comments, path: Path) -> Iterator[str]:
    yield "| Method | Request | Response | Does |\n|---|---|---|---|"
    for number, method in enumerate(methods):
        request, response = (_link(name) for name in (method.input_type, method.output_type))
        stream = "stream of " if method.server_streaming else ""
        does = comments[(*path, _METHODS, number)]
        yield f"| `{method.name}` | {request} | {stream}{response} | {_cell(does)} |"
    yield ""


def _message(message: DescriptorProto, comments: _Comments, path: Path, parent: str) -> Iterator[str]:
    lines = [f"### {parent}{message.name}\n"]
    if comment := comments[path]:
        lines.append(f"{comment}\n")
    if message.field:
        lines.append("| Field | Type | Number | Meaning |\n|---|---|---|---|")
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    for number, field in enumerate(message.field):
        meaning = comments[(*path, _FIELDS, number)]
        if field.HasField("oneof_index") and not field.proto3_optional:
            meaning = f"One of `{message.oneof_decl[field.oneof_index].name}`. {meaning}"
        kind = _field_type(field, maps)
        lines.append(f"| `{field.name}` | {kind} | {field.number} | {_cell(meaning)} |")
    yield "\n".join([*lines, ""])
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(nested, comments, (*path, _NESTED, number), f"{parent}{message.name}.")


def _field_type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    """The type of a field, with its presence."""
    if field.type == _FIELD.TYPE_MESSAGE and (entry := maps.get(field.type_name.rpartition(".")[2])):
        key, value = entry.field
        return f"map of {_one_type(key)} to {_one_type(value)}"
    if field.label == _FIELD.LABEL_REPEATED:
        return f"repeated {_one_type(field)}"
    return f"optional {_one_type(field)}" if field.proto3_optional else _one_type(field)


def _one_type(field: FieldDescriptorProto) -> str:
    if field.type in (_FIELD.TYPE_MESSAGE, _FIELD.TYPE_ENUM):
        return _link(field.type_name)
    return _SCALARS[field.type]


def _enum(enum: EnumDescriptorProto, comments: _Comments, path: Path, parent: str) -> str:
    lines = [f"### {parent}{enum.name}\n", f"{comments[path]}\n"]
    lines.append("| Value | Number | Meaning |\n|---|---|---|")
    for number, value in enumerate(enum.value):
        meaning = _cell(comments[(*path, _VALUES, number)])
        lines.append(f"| `{value.name}` | {value.number} | {meaning} |")
    return "\n".join([*lines, ""])


def _link(type_name: str) -> str:
    """A type: one of this page as a link to its heading."""
    name = type_name.removeprefix(".")
    if not name.startswith(f"{PACKAGE}."):
        return f"`{name}`"
    short = name.removeprefix(f"{PACKAGE}.")
    return f"[{short}](#{short.lower().replace('.', '')})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
