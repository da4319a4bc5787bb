"""Writes docs/reference.md, the gRPC API, from the schema and its comments. `python tools/api_page.py`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from isthmus_core.roles import who_may

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
HEAD = """# gRPC reference

Made by `tools/api_page.py` from `protos/isthmus/v1`. [API](api.md) says how it is used. Clients need `InferenceService`
only; the other services are between processes, and for operators. Health (`grpc.health.v1`) and reflection are on every
port. Errors are status codes with one message of `errors.proto` in `grpc-status-details-bin`.
"""
# Of the services, those that clients use first.
SERVICES = ("InferenceService", "CoordinatorService", "WorkerService", "MemberService", "KvTransferService")
# Numbers of fields in descriptor.proto, of which the paths of comments are made.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 4, 5, 6
_MESSAGE_FIELD, _ENUM_VALUE, _SERVICE_METHOD = 2, 2, 2
_KINDS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}
_NAMED = (FieldDescriptorProto.TYPE_MESSAGE, FieldDescriptorProto.TYPE_ENUM)


def compiled() -> list[FileDescriptorProto]:
    """Every file of the schema, with comments."""
    sources = sorted((ROOT / "protos" / "isthmus" / "v1").glob("*.proto"))
    includes = [f"-I{ROOT / 'protos'}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    with tempfile.NamedTemporaryFile() as out:
        flags = ["--include_source_info", f"--descriptor_set_out={out.name}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *includes, *flags, *map(str, sources)], check=True)
        return list(FileDescriptorSet.FromString(Path(out.name).read_bytes()).file)


class Reference:
    """The page of a set of files."""

    def __init__(self, files: list[FileDescriptorProto]) -> None:
        self._notes: dict[tuple[str, tuple[int, ...]], str] = {}
        self._messages: dict[str, tuple[FileDescriptorProto, int, DescriptorProto]] = {}
        self._enums: dict[str, tuple[FileDescriptorProto, int, EnumDescriptorProto]] = {}
        self._services: dict[str, tuple[FileDescriptorProto, int, ServiceDescriptorProto]] = {}
        for file in files:
            for place in file.source_code_info.location:
                self._notes[file.name, tuple(place.path)] = " ".join(place.leading_comments.split())
            self._messages |= {
                f".{file.package}.{one.name}": (file, at, one) for at, one in enumerate(file.message_type)
            }
            self._enums |= {f".{file.package}.{one.name}": (file, at, one) for at, one in enumerate(file.enum_type)}
            self._services |= {one.name: (file, at, one) for at, one in enumerate(file.service)}

    def page(self) -> str:
        """All services, what their messages hold, and the details of errors."""
        parts = [HEAD]
        errors = [name for name, (file, _, _) in self._messages.items() if file.name.endswith("/errors.proto")]
        shown: set[str] = set()
        for name in [*SERVICES, *sorted(self._services.keys() - set(SERVICES))]:
            parts += self._service(name)
            asked = [
                kind for method in self._services[name][2].method for kind in (method.input_type, method.output_type)
            ]
            parts += self._types(asked, shown)
        parts.append("\n## Details of errors\n")
        parts += self._types(errors, shown)
        return "".join(parts)

    def _service(self, name: str) -> Iterator[str]:
        file, at, service = self._services[name]
        yield f"\n## {name}\n\n{self._note(file, _FILE_SERVICE, at)}\n"
        yield "\n| method | asks | answers | roles | |\n|---|---|---|---|---|\n"
        for number, method in enumerate(service.method):
            roles = ", ".join(sorted(role.value for role in who_may(f"/{file.package}.{name}/{method.name}")))
            asks = _stream(method.client_streaming) + _link(method.input_type)
            answers = _stream(method.server_streaming) + _link(method.output_type)
            note = self._note(file, _FILE_SERVICE, at, _SERVICE_METHOD, number)
            yield f"| `{method.name}` | {asks} | {answers} | {roles} | {note} |\n"

    def _types(self, names: list[str], shown: set[str]) -> Iterator[str]:
        """These messages and enums and all that they are made of, each once."""
        waiting = list(names)
        while waiting:
            name = waiting.pop(0)
            if name in shown:
                continue
            shown.add(name)
            if name in self._messages:
                yield from self._message(name)
                waiting += [field.type_name for field in self._messages[name][2].field if field.type in _NAMED]
            elif name in self._enums:
                yield from self._enum(name)

    def _message(self, name: str) -> Iterator[str]:
        file, at, message = self._messages[name]
        yield f"\n### {message.name}\n\n{self._note(file, _FILE_MESSAGE, at)}\n"
        if not message.field:
            return
        yield "\n| field | | type | |\n|---|---|---|---|\n"
        for number, field in enumerate(message.field):
            note = self._note(file, _FILE_MESSAGE, at, _MESSAGE_FIELD, number)
            yield f"| `{field.name}` | {field.number} | {_type(message, field)} | {note} |\n"

    def _enum(self, name: str) -> Iterator[str]:
        file, at, enum = self._enums[name]
        yield f"\n### {enum.name}\n\n{self._note(file, _FILE_ENUM, at)}\n\n| value | | |\n|---|---|---|\n"
        for number, value in enumerate(enum.value):
            yield f"| `{value.name}` | {value.number} | {self._note(file, _FILE_ENUM, at, _ENUM_VALUE, number)} |\n"

    def _note(self, file: FileDescriptorProto, *path: int) -> str:
        text = self._notes.get((file.name, path), "")
        return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def _stream(streaming: bool) -> str:
    return "stream of " if streaming else ""


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})" if type_name.startswith(".isthmus.") else f"`{type_name[1:]}`"


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    kind = _link(field.type_name) if field.type in _NAMED else f"`{_KINDS[field.type]}`"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {kind}"
    if field.proto3_optional:
        return f"{kind}, may be absent"
    if field.HasField("oneof_index"):
        return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return kind


def render_page() -> str:
    """The page of today."""
    return Reference(compiled()).page()


if __name__ == "__main__":
    PAGE.write_text(render_page())
