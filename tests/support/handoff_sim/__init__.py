"""Deterministic simulation of the hand-off: the real hub core, rank role and scheduler role on a virtual clock.

script    what is asked for and what goes wrong, from a seed
schedule  runs a script and raises Violation
coverage  what must be met
shrink    makes a failing script small
campaign  many seeds over several processes
"""

from .coverage import Coverage as Coverage
from .coverage import recorded_transitions as recorded_transitions
from .plans import plans_made_once as plans_made_once
from .schedule import Schedule as Schedule
from .script import Script as Script
from .script import generate as generate
from .violation import Violation as Violation
