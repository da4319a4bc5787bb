"""The scheduler of the engine process: which request computes what in the next step. No I/O, no clock, no thread."""

from isthmus_worker.scheduler.events import ContextDone as ContextDone
from isthmus_worker.scheduler.events import RequestFinished as RequestFinished
from isthmus_worker.scheduler.events import RequestReleased as RequestReleased
from isthmus_worker.scheduler.events import RequestTokens as RequestTokens
from isthmus_worker.scheduler.events import RequestTookOver as RequestTookOver
from isthmus_worker.scheduler.events import SchedulerEvent as SchedulerEvent
from isthmus_worker.scheduler.handoffs import Handoffs as Handoffs
from isthmus_worker.scheduler.handoffs import Held as Held
from isthmus_worker.scheduler.handoffs import Transceiver as Transceiver
from isthmus_worker.scheduler.limits import Limits as Limits
from isthmus_worker.scheduler.memory import Memory as Memory
from isthmus_worker.scheduler.scheduler import Scheduler as Scheduler
from isthmus_worker.scheduler.step import StepPlan as StepPlan
