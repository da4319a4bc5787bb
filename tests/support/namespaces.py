"""Two network namespaces with cables between them that can be cut one by one; the host's own network is not touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

# UCX looks for interfaces in /sys, which shows those of the namespace it was mounted in.
HOLDER = ["unshare", "-n", "-m", "sh", "-c", "mount -t sysfs sysfs /sys && exec cat"]


def namespaces_work() -> bool:
    """True when this process may make them."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        return False
    mount = ["unshare", "-n", "-m", "mount", "-t", "sysfs", "sysfs", "/sys"]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


class Cables:
    """A cable for each name. Its end on side 0 or 1 is `<name><side>`, with the address that `address` says."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._holders = [subprocess.Popen(HOLDER, stdin=subprocess.PIPE) for _ in range(2)]
        for holder in self._holders:
            _entered(holder)
        self.prefixes = [("nsenter", "-t", str(holder.pid), "-n", "-m") for holder in self._holders]
        there = str(self._holders[1].pid)
        for name in names:
            self.ip(0, "link", "add", f"{name}0", "type", "veth", "peer", "name", f"{name}1", "netns", there)
        for side in (0, 1):
            self.ip(side, "link", "set", "lo", "up")
            for name in names:
                self.ip(side, "addr", "add", f"{self.address(name, side)}/24", "dev", f"{name}{side}")
                self.ip(side, "link", "set", f"{name}{side}", "up")
        for side in (0, 1):
            for name in names:
                self._running(f"{name}{side}", side)

    def address(self, name: str, side: int) -> str:
        """Of one end."""
        return f"10.77.{self._names.index(name)}.{side + 1}"

    def ip(self, side: int, *arguments: str) -> None:
        """The command, in one of the namespaces."""
        subprocess.run([*self.prefixes[side], "ip", *arguments], check=True, capture_output=True)

    def cut(self, name: str) -> None:
        """Packets are lost from now on; nobody is told."""
        self.ip(0, "link", "set", f"{name}0", "down")

    def mend(self, name: str) -> None:
        """They pass again."""
        self.ip(0, "link", "set", f"{name}0", "up")

    def mute(self, name: str) -> None:
        """What side 0 sends is lost from now on; what side 1 sends arrives."""
        self.ip(0, "route", "add", "blackhole", f"{self.address(name, 1)}/32")

    def unmute(self, name: str) -> None:
        """It passes again."""
        self.ip(0, "route", "del", "blackhole", f"{self.address(name, 1)}/32")

    def close(self) -> None:
        """The namespaces end with their processes."""
        for holder in self._holders:
            holder.kill()
            holder.communicate()

    def _running(self, device: str, side: int) -> None:
        """The kernel reports a carrier up to a second late; UCX does not use an interface before."""
        command = [*self.prefixes[side], "cat", f"/sys/class/net/{device}/operstate"]
        for _ in range(500):
            if subprocess.run(command, check=True, capture_output=True).stdout.strip() == b"up":
                return
            time.sleep(0.02)
        raise AssertionError(f"{device} has no carrier")


def _entered(holder: subprocess.Popen[bytes]) -> None:
    """The namespaces are ready when the process has become `cat`."""
    while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "cat":
        assert holder.poll() is None
        time.sleep(0.005)
