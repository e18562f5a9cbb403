"""Methods as Metal has them: one that names no address space is for objects of a thread.

The compiler takes such a method for objects anywhere, so that inside it ``this`` fits no ``thread`` pointer.
The edits made here give it ``thread`` objects, and beside it a twin for all others, temporaries above all,
that hands on to it. A method that names ``thread`` gets a twin for temporaries only.
"""

from __future__ import annotations

from collections.abc import Sequence

from .declarations import ADDRESS_SPACES, SCALAR_TYPES, SPECIFIERS, Edit
from .parameters import declarator
from .tokens import Token, closing, split

_OTHERS = frozenset({"static", "friend", "typedef", "using", "virtual"})


def thread_method(
    text: str, struct: str, template: Sequence[Token], head: Sequence[Token], paren: int, end: int
) -> list[Edit]:
    """The edits for one method of ``struct``, or none where it is no such method.

    ``template`` is what stands before ``head``, the tokens from the return type to the body or ``;``; the
    parameters open at index ``paren`` of it. ``end`` is where the method ends in ``text``.
    """
    if paren and head[paren - 1].text == "operator":  # operator()(...)
        paren = closing(head, paren) + 1
    if paren >= len(head) or head[paren].text != "(" or (head[paren + 1].text in ("*", "&")):
        return []
    close = closing(head, paren)
    name = _name(head, paren)
    before, after = head[: name[0]], head[close + 1 :]
    words = {t.text for t in after}
    spaces = words & ADDRESS_SPACES
    if words & {"=", "&", "&&"} or spaces - {"thread"} or {t.text for t in before} & _OTHERS:
        return []
    called = text[head[name[0]].offset : head[paren - 1].end]
    conversion = called.startswith("operator")
    if called in (struct, "operator=") or (not before and not conversion) or head[name[0] - 1].text == "~":
        return []
    const = bool(after) and after[0].text == "const"
    place = after[0].end if const else head[close].end
    written, arguments = named_parameters(text, head[paren + 1 : close])
    front = "".join(f"{t.text} " for t in template) + " ".join(
        t.text for t in before if t.text != "constexpr"
    )
    explicit = _template_arguments(template)
    if called.startswith("operator") or not explicit:
        call = f"{called}({arguments})"
    else:
        call = f"template {called}<{explicit}>({arguments})"
    if spaces:
        return _for_temporaries(struct, front, called, written, call, end, const="const" in words)
    suffix = text[head[close].end : head[-1].end].replace("\n", " ")
    this = f"(({'const ' if const else ''}__private {struct}*)this)"
    twin = f" {front} {called}({written}){suffix} {{ return {this}->{call}; }}"
    return [Edit(place, place, " __private"), Edit(end, end, twin)]


def _for_temporaries(
    struct: str, front: str, called: str, written: str, call: str, end: int, *, const: bool
) -> list[Edit]:
    """The twin of a method that names ``thread``: an argument more tells the two apart."""
    if (called.startswith("operator") and called != "operator()") or "..." in written:
        return []
    qualifier = "const " if const else ""
    given = f"{written}, " if written else ""
    this = f"(({qualifier}__private {struct}*)this)"
    twin = f" {front} {called}({given}msl_temporary = {{}}) {qualifier}&& {{ return {this}->{call}; }}"
    return [Edit(end, end, twin)]


def _name(head: Sequence[Token], paren: int) -> tuple[int, int]:
    """Where the name before the parameters stands."""
    for i in range(paren):
        if head[i].text == "operator":
            return i, paren
    return paren - 1, paren


def named_parameters(text: str, tokens: Sequence[Token], *, attributes: bool = True) -> tuple[str, str]:
    """The parameters, each with a name, and the arguments that hand them on.

    Without ``attributes`` they are spelled by their tokens, between which such may have stood.
    """
    parts = split(tokens)
    if len(parts) == 1 and [t.text for t in parts[0]] == ["void"]:
        return "", ""
    written, arguments = [], []
    for n, part in enumerate(parts):
        stop = next((i for i, t in enumerate(part) if t.text == "="), len(part))
        plain = part[:stop]
        name = declarator(plain)
        if name is None or not _is_name(plain, name):
            at = next((i for i, t in enumerate(plain) if t.text == "[" and i), len(plain))
            shown = " ".join(t.text for t in plain[:at]) + f" msl_a{n} " + " ".join(t.text for t in part[at:])
            called = f"msl_a{n}"
        else:
            spelled = text[part[0].offset : part[-1].end].replace("\n", " ")
            shown, called = spelled if attributes else " ".join(t.text for t in part), name.text
        written.append(shown)
        arguments.append(called + ("..." if any(t.text == "..." for t in plain) else ""))
    return ", ".join(written), ", ".join(arguments)


def _is_name(plain: Sequence[Token], name: Token) -> bool:
    """Whether ``name`` is a parameter's name, and not its type."""
    i = next(i for i, t in enumerate(plain) if t is name)
    types = [t for t in plain[:i] if t.text not in SPECIFIERS | ADDRESS_SPACES]
    last = plain[-1].text in ("*", "&", "&&", ">", "...")
    return bool(types) and plain[i - 1].text != "::" and not last and name.text not in SCALAR_TYPES


def _template_arguments(template: Sequence[Token]) -> str:
    """The template's own parameters as arguments, as far as they have names."""
    names = []
    inner = [
        i for i, t in enumerate(template) if t.text == "template" and (not i or template[i - 1].text == ">")
    ]
    for part in split(template[inner[-1] + 2 : -1]) if inner else []:
        stop = next((i for i, t in enumerate(part) if t.text == "="), len(part))
        if stop < 2 or part[stop - 1].kind != "name":
            break
        names.append(part[stop - 1].text + ("..." if any(t.text == "..." for t in part[:stop]) else ""))
    return ", ".join(names)
