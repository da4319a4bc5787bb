"""The lock of a worker instance: see `isthmus_core.instance_lock`."""

from isthmus_core.instance_lock import MAX_EXITED as MAX_EXITED
from isthmus_core.instance_lock import InstanceLock as InstanceLock
from isthmus_core.instance_lock import acquire as acquire
