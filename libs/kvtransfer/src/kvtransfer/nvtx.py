"""Ranges for NVIDIA's profilers, and nothing at all when none is attached.

Nsight Systems and Nsight Compute load a library into the process and say so in the environment before it starts. Then
torch draws the ranges, which every process with a GPU has loaded; this package does not import it.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_ATTACHED = "NVTX_INJECTION64_PATH" in os.environ
_NOTHING: AbstractContextManager[object] = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """A range around a `with` block, for example `kv.plan`."""
    if not _ATTACHED:
        return _NOTHING
    torch: Any = sys.modules.get("torch")
    return _NOTHING if torch is None else torch.cuda.nvtx.range(name)
