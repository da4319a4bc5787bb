"""`python -m isthmus_coordinator --config FILE [--set section.key=value]...`"""

from __future__ import annotations

from isthmus_coordinator.service import main
from isthmus_core.service import run_service

if __name__ == "__main__":
    run_service("isthmus-coordinator", "Members, placement and leases of an Isthmus cluster.", main)
