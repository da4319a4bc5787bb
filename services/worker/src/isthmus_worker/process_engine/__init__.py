"""The engine as a child process of the hub: `ProcessEngine` implements seam 1 over local sockets."""

from isthmus_worker.process_engine.child import ExitReport
from isthmus_worker.process_engine.engine import ProcessEngine
from isthmus_worker.process_engine.launch import EngineLaunch

__all__ = ["EngineLaunch", "ExitReport", "ProcessEngine"]
