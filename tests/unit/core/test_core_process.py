"""A process that has settled."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import gc
from isthmus_core.process import settle_heap
kept = [[number] for number in range(1000)]
settle_heap()
assert gc.get_freeze_count() > 1000, gc.get_freeze_count()
loop = []
loop.append(loop)
del loop
assert gc.collect() >= 1, "what is made later is still collected"
"""


def test_what_is_there_is_not_looked_at_again():
    subprocess.run([sys.executable, "-c", _CODE], check=True, timeout=60)
