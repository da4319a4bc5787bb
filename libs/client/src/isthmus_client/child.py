"""What the supervisor really starts: a module that is killed by the kernel when the supervisor dies, however it dies.

python -m isthmus_client.child PARENT_PID MODULE [ARGUMENT]...
"""

from __future__ import annotations

import runpy
import sys

from isthmus_core.process import die_with_parent


def main() -> None:
    """Tie this process to its parent, then become `python -m MODULE ARGUMENT...`."""
    parent, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
