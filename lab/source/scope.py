"""What of Metal is out of scope here, by the names of its types: textures, ray tracing, tensors and more."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from .tokens import Token

HEADERS = (
    "metal_command_buffer", "metal_cooperative_tensor", "metal_graphics", "metal_imageblocks",
    "metal_interpolate", "metal_mesh", "metal_raytracing", "metal_tensor", "metal_tessellation",
    "metal_texture", "metal_visible_function_table",
)  # fmt: skip
"""Headers that only bring what is out of scope: a source may name them and not use them."""

_TYPES = (
    ("textures", re.compile(r"(texture|depth)(1d|2d|3d|cube|_buffer)\w*")),
    ("samplers", re.compile(r"sampler")),
    ("imageblocks", re.compile(r"imageblock\w*")),
    ("function tables", re.compile(r"(visible|intersection)_function_table")),
    ("acceleration structures", re.compile(r"(primitive_|instance_)?acceleration_structure")),
    ("ray tracing", re.compile(r"raytracing|intersector|intersection_(query|result|params)")),
    ("command buffers", re.compile(r"(render|compute)_(command|pipeline_state)|command_buffer")),
    ("tensors", re.compile(r"cooperative_tensor|tensor_(inline|handle|offset)|mpp|tensor")),
    ("meshes", re.compile(r"mesh|mesh_grid_properties")),
)
_ORDINARY = {"sampler": "name", "tensor": "<", "mesh": "<", "intersector": "<", "raytracing": "namespace",
             "mpp": "namespace", "command_buffer": "name"}  # fmt: skip
"""Words that are ordinary names too, and what has to follow (or be around) where they are Metal's."""


def out_of_scope(tokens: Sequence[Token], also: Collection[str] = ()) -> tuple[Token, str] | None:
    """The first of ``tokens`` that is out of scope, and what it is; ``also`` are further such names."""
    for i, token in enumerate(tokens):
        if token.kind != "name":
            continue
        if token.text in also:
            return token, "textures and render functions"
        what = next((what for what, pattern in _TYPES if pattern.fullmatch(token.text)), None)
        if what is not None and _is_metals(tokens, i):
            return token, what
    return None


def _is_metals(tokens: Sequence[Token], i: int) -> bool:
    needs = _ORDINARY.get(tokens[i].text)
    if needs is None:
        return True
    following = tokens[i + 1] if i + 1 < len(tokens) else None
    if needs == "namespace":
        before = tokens[i - 1].text if i else ""
        return before == "namespace" or (following is not None and following.text == "::")
    if following is None:  # the type of a parameter without a name
        return i == 0 or tokens[i - 1].text in ("::", "const")
    return following.text == needs or (needs == "name" and following.kind == "name")
