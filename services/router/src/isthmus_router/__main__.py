"""`python -m isthmus_router --config FILE [--set section.key=value]...`"""

from __future__ import annotations

from isthmus_core.service import run_service
from isthmus_router.service import main

if __name__ == "__main__":
    run_service("isthmus-router", "Front door of an Isthmus cluster: gRPC and OpenAI HTTP.", main)
