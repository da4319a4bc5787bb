"""What the parent really starts: a process that the kernel kills when the parent dies, however it dies.

python -m isthmus_router.fleet.child PARENT_PID STATUS_FD MODULE [ARGUMENT]...

MODULE `isthmus_router` becomes a router that shares its ports and writes its status to STATUS_FD; any other module is
run as it is.
"""

from __future__ import annotations

import os
import runpy
import sys
from functools import partial

from isthmus_core.process import die_with_parent
from isthmus_core.service import run_service


def main() -> None:
    """Tie this process to its parent, then become what was asked for."""
    parent, status_fd, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    if module == "isthmus_router":
        from isthmus_router.router_process import run_router

        run_service(
            "isthmus-router", "One process of a router fleet.", partial(run_router, status_fd=int(status_fd)), arguments
        )
    else:
        os.close(int(status_fd))
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
