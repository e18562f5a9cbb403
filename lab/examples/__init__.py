"""The example kernels of ``kernels/examples`` with inputs and float64 references.

Each example draws its inputs from a seed, calls its kernel, and states what must come out: computed in
float64 with NumPy from the definition, not in the kernel's way.
"""

from .example import Example, Outcome, check
from .threadgroups import THREADGROUPS
from .threads import THREADS

EXAMPLES: tuple[Example, ...] = THREADS + THREADGROUPS

__all__ = ["EXAMPLES", "Example", "Outcome", "check"]
