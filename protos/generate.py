"""Generates the Python stubs of `isthmus/v1/*.proto` into `gen/` (never committed).

Run by the package build (`hatch_build.py`) and by hand: `python protos/generate.py`. The import path inside generated
code is the path relative to `-I`, so the folder `isthmus/v1` is what makes `from isthmus.v1 import kv_pb2` right.

protoc writes type stubs for messages but none for services; `service_stub` writes those from the compiled descriptors,
typed for grpc.aio, the only flavour Isthmus uses.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto

STUB_HEADER = """\
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc
import grpc.aio
"""


def _module(proto_name: str) -> str:
    """Python module of a .proto file's messages: `isthmus/v1/kv.proto` -> `isthmus.v1.kv_pb2`."""
    return proto_name.removesuffix(".proto").replace("/", ".") + "_pb2"


def _method(method: MethodDescriptorProto, request: str, response: str) -> tuple[str, str]:
    """The line of a method in the stub class and its lines in the servicer class."""
    kind = ("Stream" if method.client_streaming else "Unary") + ("Stream" if method.server_streaming else "Unary")
    argument = f"request_iterator: AsyncIterator[{request}]" if method.client_streaming else f"request: {request}"
    context = f"context: grpc.aio.ServicerContext[{request}, {response}]"
    if method.server_streaming:
        # grpc.aio accepts an async generator as well as a coroutine that calls context.write.
        head, result = "def", f"AsyncIterator[{response}] | Coroutine[Any, Any, None]"
    else:
        head, result = "async def", response
    servicer = f"    {head} {method.name}(self, {argument}, {context}) -> {result}: ..."
    return f"    {method.name}: grpc.aio.{kind}MultiCallable[{request}, {response}]", servicer


def service_stub(file: FileDescriptorProto, module_of: dict[str, str]) -> str:
    """Text of `*_pb2_grpc.pyi` for one file. `module_of` maps full message names (".isthmus.v1.Select") to modules."""
    blocks: list[str] = []
    modules: set[str] = set()
    for service in file.service:
        stub = [f"class {service.name}Stub:", "    def __init__(self, channel: grpc.aio.Channel) -> None: ..."]
        servicer = [f"class {service.name}Servicer:"]
        for method in service.method:
            names: list[str] = []
            for full_name in (method.input_type, method.output_type):
                modules.add(module_of[full_name])
                names.append(f"{module_of[full_name]}.{full_name.rsplit('.', 1)[1]}")
            stub_line, servicer_line = _method(method, names[0], names[1])
            stub.append(stub_line)
            servicer.append(servicer_line)
        arguments = f"servicer: {service.name}Servicer, server: grpc.aio.Server"
        add = f"def add_{service.name}Servicer_to_server({arguments}) -> None: ..."
        blocks += ["\n".join(stub), "\n".join(servicer), add]
    imports = "".join(f"import {module}\n" for module in sorted(modules))
    return STUB_HEADER + imports + "\n" + "\n\n".join(blocks) + "\n"


def _compile(root: Path, out: Path) -> None:
    """Run protoc into the empty folder `out`. Raises RuntimeError when protoc finds an error."""
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(root)) for path in (root / "isthmus" / "v1").glob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    descriptors = out / "descriptors.binpb"
    flags = [f"-I{root}", f"-I{well_known}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    absolute = [str(root / source) for source in sources]
    command = ["protoc", *flags, f"--descriptor_set_out={descriptors}", *absolute]
    if protoc.main(command) != 0:  # pyright: ignore[reportUnknownMemberType]
        raise RuntimeError("protoc failed; its message is above")
    files = FileDescriptorSet.FromString(descriptors.read_bytes()).file
    descriptors.unlink()
    module_of = {f".{file.package}.{kind.name}": _module(file.name) for file in files for kind in file.message_type}
    for file in files:
        if file.service:
            (out / file.name.replace(".proto", "_pb2_grpc.pyi")).write_text(service_stub(file, module_of))
        else:  # protoc writes an empty service module for every file; only files with services need one
            (out / file.name.replace(".proto", "_pb2_grpc.py")).unlink()
    for folder in (out / "isthmus", out / "isthmus" / "v1"):
        (folder / "__init__.py").touch()
        (folder / "py.typed").touch()


def generate(root: Path) -> None:
    """Generate messages, type stubs and service stubs into `root/gen`.

    Files are replaced one by one, each in one step, so that a program started meanwhile finds a whole package.
    """
    gen = root / "gen"
    gen.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".gen-") as folder:
        fresh = Path(folder)
        _compile(root, fresh)
        wanted = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
        for relative in sorted(wanted):
            (gen / relative).parent.mkdir(parents=True, exist_ok=True)
            (fresh / relative).replace(gen / relative)
    for old in [path for path in gen.rglob("*") if path.is_file() and path.relative_to(gen) not in wanted]:
        if "__pycache__" not in old.parts:
            old.unlink()
    for cache in gen.rglob("__pycache__"):
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent)
