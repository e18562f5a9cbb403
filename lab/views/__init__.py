"""Views: pure functions from data to Plotly figures, for panels, reports and by themselves.

    trace = lab.o1.trace(state, q, k, v, chunks=16)
    lab.views.timeline(trace)
    lab.views.of_step(trace[7], "out")
    lab.views.attention_weights(lab.o1.readings.weights(trace, position=11, row=15, head=0))

Each takes ``dark=True`` for dark pages, and its docstring says what one sees and how to read it. They need
the extra ``notebook``; without Plotly, importing this raises LabError.
"""

from ..errors import LabError

try:
    import plotly.graph_objects  # noqa: F401
except ModuleNotFoundError as missing:
    raise LabError(
        f"Views need {missing.name}: pip install 'metal-kernel-lab[notebook]' brings it."
    ) from None

from .attention import attention_split, attention_weights
from .cells import chosen_cells
from .chunks import cell_shares, chunk_shares
from .deviation import error, of_step, worst_elements
from .far import approximation, approximation_over_rows, far_gains, masses
from .selection import block_scores, radix_passes
from .timeline import timeline

__all__ = [
    "approximation",
    "approximation_over_rows",
    "attention_split",
    "attention_weights",
    "block_scores",
    "cell_shares",
    "chosen_cells",
    "chunk_shares",
    "error",
    "far_gains",
    "masses",
    "of_step",
    "radix_passes",
    "timeline",
    "worst_elements",
]
