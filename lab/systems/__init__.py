"""What every system of kernels shares: plans as data, sessions with replaceable kernels, traces.

A system (``lab.o1``, ``lab.qsa``) says which buffers and kernels it has and how a step is dispatched;
running, replacing and tracing its kernels is done here, without knowing any of their names.
"""

from .contract import Block, Contract, Scalar, Source, System
from .deviation import Deviation, Expected
from .plan import Buffer, Dispatch, Field, Plan
from .session import Compared, Replacement, Session
from .trace import Chunk, Step, Trace, compare, record, recording

__all__ = [
    "Block",
    "Buffer",
    "Chunk",
    "Compared",
    "Contract",
    "Deviation",
    "Dispatch",
    "Expected",
    "Field",
    "Plan",
    "Replacement",
    "Scalar",
    "Session",
    "Source",
    "Step",
    "System",
    "Trace",
    "compare",
    "record",
    "recording",
]
