"""The lane-exact model: a slow and obvious interpreter of a kernel's IR.

Every executor of the lab is tested against it. ``run`` executes one dispatch of a module that ``lab.ir``
parsed; ``meeting`` says exactly who takes part in a collective.
"""

from .errors import (
    BarrierError,
    MemoryFault,
    ModelError,
    RecursionLimitError,
    StepLimitError,
    ThreadPosition,
    Trap,
    Unmodelled,
    Waiting,
)
from .machine import Launch, Met, Outcome, Report, run

__all__ = [
    "BarrierError",
    "Launch",
    "MemoryFault",
    "Met",
    "ModelError",
    "Outcome",
    "RecursionLimitError",
    "Report",
    "StepLimitError",
    "ThreadPosition",
    "Trap",
    "Unmodelled",
    "Waiting",
    "run",
]
