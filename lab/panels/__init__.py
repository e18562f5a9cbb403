"""Panels that step through the dispatches of a system, for notebooks.

They need the extra ``notebook``; without its packages, importing this raises LabError.
"""

from ..errors import LabError

try:
    import anywidget  # noqa: F401
    import ipywidgets  # noqa: F401
    import plotly  # noqa: F401
except ModuleNotFoundError as missing:
    raise LabError(
        f"A panel needs {missing.name}: pip install 'metal-kernel-lab[notebook]' brings it."
    ) from None
