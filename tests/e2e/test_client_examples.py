"""The examples, run as a reader would: Python, Node, Go and grpcurl against a cluster of mock engines that asks for a
key."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from cluster import MOCK, assert_idle, running_cluster
from isthmus_client.supervisor import LocalCluster
from isthmus_core.api_keys import ApiKey, hash_key, new_key, write_keys
from mock_oracle import oracle

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROMPT = "The capital of France is"

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="cluster")
async def _cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[LocalCluster, None]:
    folder = tmp_path_factory.mktemp("examples")
    key = new_key()
    write_keys(folder / "keys.yaml", [ApiKey(name="reader", sha256=hash_key(key))])
    options = replace(MOCK, base={"router": {"clients": {"keys_file": str(folder / "keys.yaml")}}})
    async with running_cluster(options, folder) as cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ISTHMUS_API_KEY", key)
            yield cluster
        await assert_idle(cluster)


async def run(*command: str, folder: Path = EXAMPLES, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-2000:]
    return out.decode()


def tool(name: str) -> str:
    """Its path, beside this Python or on PATH; skips, and says so, where it is not installed."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: this example was NOT run")
    return path


def said(prompt: str, tokens: int) -> str:
    return bytes(oracle(list(prompt.encode()), tokens)).decode()


async def test_python_over_grpc(cluster: LocalCluster) -> None:
    out = await run(sys.executable, "python/grpc_client.py", cluster.grpc_endpoint)
    assert out == said(PROMPT, 16) + "\n"


async def test_python_with_the_openai_sdk(cluster: LocalCluster) -> None:
    out = await run(sys.executable, "python/openai_sdk.py", f"{cluster.http_endpoint}/v1", "hello")
    assert out == said("user: hello\nassistant:", 32) + "\n"


async def test_grpcurl(cluster: LocalCluster) -> None:
    path = Path(tool("grpcurl")).parent
    script = f"PATH={path}:$PATH grpcurl/generate.sh {cluster.grpc_endpoint} 'say \"x\"'"
    assert '"prompt_tokens": 7' in await run("sh", "-c", script)


async def test_node(cluster: LocalCluster, tmp_path: Path) -> None:
    node, npm = tool("node"), tool("npm")
    shutil.copytree(EXAMPLES / "node", tmp_path / "examples" / "node")
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    folder = tmp_path / "examples" / "node"
    await run(npm, "install", "--no-audit", "--no-fund", folder=folder)
    out = await run(node, "generate.mjs", cluster.grpc_endpoint, folder=folder)
    assert out == said(PROMPT, 16) + "\n"


async def test_go(cluster: LocalCluster, tmp_path: Path) -> None:
    """With Debian's packages: modules would have to be fetched."""
    go, packages = tool("go"), Path("/usr/share/gocode")
    for needed in ("protoc", "protoc-gen-go", "protoc-gen-go-grpc"):
        tool(needed)
    if not (packages / "src" / "google.golang.org" / "grpc").is_dir():
        pytest.skip("golang-google-grpc-dev is not installed: this example was NOT run")
    folder = tmp_path / "src" / "isthmus.example" / "client"
    shutil.copytree(EXAMPLES / "go", folder, ignore=shutil.ignore_patterns("isthmusv1"))
    await run("./generate.sh", folder=folder, PROTOS=str(ROOT / "protos"))
    places = {"GO111MODULE": "off", "GOPATH": f"{tmp_path}:{packages}", "GOCACHE": str(tmp_path / "cache")}
    build = ("build", "-tags", "debian", "-o", str(tmp_path / "client"), "isthmus.example/client")
    await run(go, *build, folder=folder, **places)
    assert await run(str(tmp_path / "client"), cluster.grpc_endpoint) == said(PROMPT, 16) + "\n"
    process = await asyncio.create_subprocess_exec(
        str(tmp_path / "client"), cluster.grpc_endpoint, env={}, stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert err.startswith(b"Unauthenticated: no valid API key")
