"""The command behind container health checks: its exit code is the answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from isthmus_core.rpc import RpcServer


async def _check(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "isthmus_core.healthcheck", *arguments, stderr=subprocess.PIPE
    )
    _, err = await process.communicate()
    return process.returncode or 0, err.decode()


async def test_exit_code_follows_the_health_of_the_service():
    server = RpcServer()
    port = await server.start("127.0.0.1:0")
    target = f"127.0.0.1:{port}"
    code, err = await _check(target, "--timeout", "0.5")
    assert (code, err.strip()) == (1, f"{target} does not serve")
    await server.set_serving(True)
    assert await _check(target) == (0, "")
    await server.stop(0)
    assert (await _check(target, "--timeout", "0.5"))[0] == 1


async def test_wrong_settings_are_no_answer():
    code, err = await _check("127.0.0.1:1", "--set", "tls.ca=/nowhere.pem")
    assert code == 2
    assert "tls" in err
