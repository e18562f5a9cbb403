"""Finding the declarations of a Metal source, and the edits that make it C++ for OpenCL.

The scanner walks the tokens of preprocessed text. It knows just as much of the grammar as it takes to
find declarations in it; types are left to the compiler (see ``layout``). It never fails on half-typed
source: what it can't read it passes over, and the compiler says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from .declarations import (
    ADDRESS_SPACES,
    SCALAR_TYPES,
    SPECIFIERS,
    THREAD_ATTRIBUTES,
    Declarations,
    Edit,
    FunctionConstant,
    KernelDeclaration,
    Parameter,
    StructDeclaration,
)
from .methods import named_parameters, thread_method
from .parameters import declarator, host_name, is_bit_field, read_parameters, spelling
from .scope import out_of_scope
from .tokens import Token, closing, closing_angle, pairs, split, tokenize


def scan(text: str) -> Declarations:
    """Find the declarations in preprocessed ``text``."""
    return _Scanner(text).run()


_TYPES = frozenset({"struct", "class", "union", "enum"})
_CONTROL = frozenset(
    {"if", "while", "for", "switch", "constexpr"}
)  # what a statement may follow in parentheses
_STATEMENTS = _CONTROL | {"return", "case", "else", "do"}
_BEFORE_EXPRESSION = frozenset(
    {"(", "[", "{", "}", ";", ",", "?", ":", "=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^="}
)
_NUMBER_TYPE = re.compile(rf"({'|'.join(sorted(SCALAR_TYPES))}|unsigned|bfloat)([234](x[234])?)?")
_UNROLL = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+unroll\b([^\n]*[A-Za-z_][^\n]*)$", re.MULTILINE)
_STAGES = frozenset({"vertex", "fragment", "object", "mesh"})


def _declarators(head: Sequence[Token]) -> Sequence[Token]:
    """What follows the body of the type that a declaration defines; all of it where it defines none."""
    for i, token in enumerate(head):
        if token.text in ("(", "=", "[", "{"):
            break
        if token.text in _TYPES:
            brace = next((j for j in range(i, len(head)) if head[j].text in ("{", "=", "(")), i)
            return head[closing(head, brace) + 1 :] if head[brace].text == "{" else head
    return head


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokenize(text)
        self.found = Declarations()
        self.templates: dict[str, tuple[str, tuple[Parameter, ...], Token, Token]] = {}
        self.beyond_templates: dict[str, tuple[Token, str]] = {}
        self.fields: list[str] = []  # data members of the struct being read
        self.bit_fields: set[str] = set()  # names of all of them
        self.openings: dict[int, int] = {}  # closing brackets with the index of their opening ones
        self.storage = 0  # threadgroup declarations so far
        self.struct = ""  # name of the struct being read
        self.constructors: set[tuple[str, str]] = (
            set()
        )  # struct and parameters of those with an address space
        self.methods: set[tuple[str, str]] = set()  # struct and name of those for objects of a thread
        self.spaced: set[str] = set()  # names of methods of the struct being read that name thread objects
        self.inputs: dict[str, Parameter] = {}  # thread attributes declared outside of functions
        self.pointers: set[str] = set()  # types that are pointers to functions
        self.beyond: set[str] = set()  # types and functions that are gone, for they use what is out of scope

    def run(self) -> Declarations:
        self._function_pointers()
        self._scope(0, len(self.tokens), (), in_struct=False)
        self._words()
        self._conditionals()
        self._references()
        self._offsets()
        self._pragmas()
        return self.found

    # -- scopes ----------------------------------------------------------------------------------------

    def _scope(self, i: int, end: int, names: tuple[str, ...], *, in_struct: bool) -> None:
        """Declarations in tokens ``[i, end)`` of a namespace or struct called ``names``."""
        tokens = self.tokens
        while i < end:
            text = tokens[i].text
            if text in (";", "}", "public", "private", "protected", ":"):
                i += 1
            elif text == "namespace" or (
                text == "inline" and i + 1 < end and tokens[i + 1].text == "namespace"
            ):
                i = self._namespace(i, end, names)
            elif (
                text == "extern"
                and i + 2 < end
                and tokens[i + 1].kind == "string"
                and tokens[i + 2].text == "{"
            ):
                close = closing(tokens, i + 2)
                self._scope(i + 3, close, names, in_struct=False)
                i = close + 1
            elif text in ("using", "friend", "static_assert"):
                stop = self._statement_end(i, end)
                self._remove_beyond(i, stop)
                i = stop + 1
            else:
                i = self._declaration(i, end, names, in_struct=in_struct)

    def _namespace(self, i: int, end: int, names: tuple[str, ...]) -> int:
        tokens = self.tokens
        inner = names
        while i < end and tokens[i].text not in ("{", ";"):
            if tokens[i].kind == "name" and tokens[i].text not in ("namespace", "inline"):
                inner = (*inner, tokens[i].text)
            i += 1
        if i >= end or tokens[i].text == ";":
            return i + 1
        close = closing(tokens, i)
        self._scope(i + 1, close if tokens[close].text == "}" else end, inner, in_struct=False)
        return close + 1

    def _statement_end(self, i: int, end: int) -> int:
        """Index of the ``;`` that ends the statement at ``i`` (brackets skipped), or ``end``."""
        while i < end and self.tokens[i].text != ";":
            if self.tokens[i].text in ("(", "[", "{", "[["):
                i = closing(self.tokens, i)
            i += 1
        return i

    # -- declarations ----------------------------------------------------------------------------------

    def _declaration(self, start: int, end: int, names: tuple[str, ...], *, in_struct: bool) -> int:
        """Read one declaration; returns the index after it."""
        tokens = self.tokens
        i = start
        templated = False
        while i < end and tokens[i].text == "template":
            if i + 1 < end and tokens[i + 1].text == "<":
                close = closing_angle(tokens, i + 1, certain=True)
                if close is None:
                    return self._statement_end(i, end) + 1
                self._template_parameters(i + 2, close)
                templated, i = True, close + 1
            else:
                return self._instantiation(start, end, names)
        head_start = i
        parameters: tuple[int, int] | None = None
        equals = False
        in_initialisers = False
        members: tuple[str, ...] = ()  # of a type without a name that is defined here
        while i < end:
            text = tokens[i].text
            if text == ";":
                head = tokens[head_start:i]
                if not in_struct and self._remove_beyond(start, i):
                    return i + 1
                if in_struct and parameters is not None:
                    self._method(start, head_start, parameters[0], i, tokens[i].end)
                self._variables(
                    head, parameters is not None, members, names, in_struct=in_struct, templated=templated
                )
                return i + 1
            if text in _TYPES and parameters is None and not equals:
                body = self._type_body(i, end)
                if body is not None and text != "enum" and not in_struct:
                    stop = self._statement_end(closing(tokens, body), end)
                    if self._remove_beyond(start, stop):
                        self.beyond.update(t.text for t in tokens[i + 1 : i + 2] if t.kind == "name")
                        return stop + 1
                if body is not None:
                    i, members = self._type(i, body, names, head_start, templated)
                    continue
            elif text == "=":
                equals = equals or not (i and tokens[i - 1].text == "operator")
            elif text in ("(", "[", "[["):
                close = closing(tokens, i)
                if (
                    text == "("
                    and parameters is None
                    and not equals
                    and self._may_name_function(i, head_start)
                ):
                    parameters = (i, close)
                i = close
            elif text == "<" and tokens[i - 1].kind == "name" and tokens[i - 1].text != "operator":
                i = closing_angle(tokens, i) or i
            elif text == ":" and parameters is not None:
                in_initialisers = True
            elif text == "{":
                close = closing(tokens, i)
                function = parameters is not None and not equals
                member_init = in_initialisers and tokens[i - 1].kind == "name" and close + 1 < end
                if function and not (member_init and tokens[close + 1].text in (",", "{")):
                    assert parameters is not None
                    self._function(start, head_start, parameters, i, close, names, templated, in_struct)
                    return close + 1
                i = close
            i += 1
        return end

    def _may_name_function(self, paren: int, head_start: int) -> bool:
        before = self.tokens[paren - 1] if paren > head_start else None
        if before is None:
            return False
        if before.kind == "name":
            return before.text not in ("alignas", "decltype", "__attribute__", "noexcept", "sizeof")
        i = paren - 1  # operator+ ( ... ), operator() ( ... ), f<int> ( ... )
        while i > head_start and self.tokens[i].kind == "punct" and i > paren - 4:
            i -= 1
        return self.tokens[i].text == "operator" or before.text == ">"

    # -- types -----------------------------------------------------------------------------------------

    def _type_body(self, i: int, end: int) -> int | None:
        """Index of the ``{`` of the struct, union or enum that starts at ``i``, if it has one."""
        while i < end and self.tokens[i].text not in (";", "{", "(", ")", "=", "*", "&", ",", ">"):
            if self.tokens[i].text in ("[[", "["):
                i = closing(self.tokens, i)
            elif self.tokens[i].text == "alignas":
                i = closing(self.tokens, i + 1)
            elif self.tokens[i].text == "<":
                i = closing_angle(self.tokens, i) or i
            i += 1
        return i if i < end and self.tokens[i].text == "{" else None

    def _type(
        self, i: int, body: int, names: tuple[str, ...], head_start: int, templated: bool
    ) -> tuple[int, tuple[str, ...]]:
        """Read the type at ``i``; returns the index after it, and its members where it has no name."""
        tokens = self.tokens
        close = closing(tokens, body)
        if tokens[i].text == "enum":
            return close + 1, ()
        name, j = "", i + 1
        inherited: list[str] = []
        while j < body and tokens[j].text != ":":
            if tokens[j].text in ("[[", "("):
                j = closing(tokens, j)
            elif tokens[j].kind == "name" and tokens[j].text not in ("alignas", "final"):
                name = name or tokens[j].text
            elif tokens[j].text == "<":
                templated = True
                j = closing_angle(tokens, j) or j
            j += 1
        for base in split(tokens[j + 1 : body]):
            known = self.found.structs.get(base[-1].text) if base else None
            if known is None:  # members that we cannot name: those of a template's instance, for one
                templated = True
            else:
                inherited.extend(known.fields)
        aliases = []
        if any(t.text == "typedef" for t in tokens[head_start:i]):
            stop = self._statement_end(close, len(tokens))
            aliases = [
                part[-1].text for part in split(tokens[close + 1 : stop]) if part and part[-1].kind == "name"
            ]
        outer = (self.fields, self.struct, self.spaced, self.constructors)
        self.fields, self.struct, self.constructors = [], name, set()
        self.spaced = self._for_threads(body, close)
        self._scope(body + 1, close, (*names, name) if name else names, in_struct=True)
        fields, (self.fields, self.struct, self.spaced, self.constructors) = self.fields, outer
        self._method_spaces(body, close)
        if not templated:
            for alias in [name, *aliases]:
                if alias:
                    qualified = "::" + "::".join((*names, alias))
                    words = frozenset(t.text for t in tokens[body:close] if t.kind == "name")
                    members = (*inherited, *fields)
                    self.found.structs[alias] = StructDeclaration(alias, qualified, members, words)
        return close + 1, () if name else tuple(fields)

    def _for_threads(self, body: int, close: int) -> set[str]:
        """Names of the struct's methods that have a form for objects of a thread by name."""
        tokens = self.tokens
        found = set()
        for i in range(body, close):
            if tokens[i].text == "thread" and (tokens[i - 1].text == ")" or tokens[i - 2].text == ")"):
                opening = next((j for j in range(i, body, -1) if tokens[j].text == "("), body)
                found.add(tokens[opening - 1].text)
        return found

    def _constructor(self, start: int, parameters: tuple[int, int], close: int) -> None:
        """``S(int x) thread : ...`` and the like for each address space: one without serves them all."""
        tokens = self.tokens
        i = parameters[1] + 1
        spaces = []
        while tokens[i].text in ADDRESS_SPACES:
            spaces.append(tokens[i])
            i += 1
        takes = " ".join(
            t.text for t in tokens[start : parameters[1]]
        )  # with what stands before: template <...>
        if spaces and (self.struct, takes) in self.constructors:
            self._blank(tokens[start].offset, tokens[close].end)
        elif spaces:
            self.constructors.add((self.struct, takes))
            self.found.edits.append(Edit(spaces[0].offset, spaces[-1].end, ""))

    def _method(self, start: int, head_start: int, paren: int, stop: int, end: int) -> None:
        tokens = self.tokens
        template, head = tokens[start:head_start], tokens[head_start:stop]
        named = any(t.text == "thread" for t in tokens[closing(tokens, paren) : stop])
        if self.struct and (named or tokens[paren - 1].text not in self.spaced):
            edits = thread_method(self.text, self.struct, template, head, paren - head_start, end)
            if edits:
                self.found.second += edits
                if not named:
                    self.methods.add((self.struct, tokens[paren - 1].text))

    def _outer_method(self, head_start: int, parameters: tuple[int, int], body: int) -> None:
        """``void S::f() { ... }``, declared in its struct."""
        tokens = self.tokens
        owners = {t.text for t in tokens[head_start : parameters[0] - 1] if t.kind == "name"}
        name = tokens[parameters[0] - 1].text
        if any((owner, name) in self.methods for owner in owners):
            last = tokens[parameters[1]]
            if tokens[parameters[1] + 1].text == "const":
                last = tokens[parameters[1] + 1]
            self.found.second.append(Edit(last.end, last.end, " __private"))

    def _method_spaces(self, body: int, close: int) -> None:
        """Give methods for ``constant`` objects a form the compiler has."""
        tokens = self.tokens
        methods: list[tuple[str, Token | None]] = []  # name and parameters, address space
        i = body + 1
        while i < close:
            if tokens[i].text in ("{", "["):
                i = closing(tokens, i)
            elif tokens[i].text == "(":
                end = closing(tokens, i)
                method, j = " ".join(t.text for t in tokens[i - 1 : end]), end + 1
                while j < close and tokens[j].text in ("const", "volatile"):
                    j += 1
                space = tokens[j] if j < close and tokens[j].text in ADDRESS_SPACES else None
                methods.append((method, space))
                i = end
            i += 1
        for method, space in methods:
            if space is not None and space.text == "constant":
                twins = [s.text if s else "" for other, s in methods if other == method]
                # The overload for device objects serves constant ones too; this one stays, out of the way.
                out_of_the_way = "device" in twins or "" in twins
                self.found.edits.append(Edit(space.offset, space.end, "__constant" if out_of_the_way else ""))

    # -- variables -------------------------------------------------------------------------------------

    def _variables(
        self,
        head: Sequence[Token],
        called: bool,
        members: tuple[str, ...],
        names: tuple[str, ...],
        *,
        in_struct: bool,
        templated: bool,
    ) -> None:
        """A declaration up to its ``;``: variables, data members, or with ``called`` perhaps a prototype."""
        if not head:
            return
        declarators = _declarators(head)
        if any(t.text == "constant" for t in self._specifiers(head)) and not self._indirect(declarators):
            if in_struct or templated:
                self._storage_only(head)
            elif self._is_member(head):  # declared, and given its value, in its struct
                if any(t.text == "=" for t in head):
                    self._storage_only(head)
                else:
                    self._blank(head[0].offset, self._after(head[-1]))
            elif any(t.text == "function_constant" for t in head):
                self._function_constants(head, names)
            elif self._made_from_function_constants(head):
                edits, self.found.edits = self.found.edits, []
                self._constant(head)
                own, self.found.edits = tuple(self.found.edits), edits
                self._derived(head, names, own)
            else:
                self._constant(head)
        elif not in_struct and not called and self._input(head):
            return
        elif not in_struct and not called and not templated and self._mutable(head):
            text = f"program-scope variable '{declarator(head).text}' must be in constant memory"  # type: ignore[union-attr]
            self.found.refused.append((head[0], text))
        elif not in_struct or called or head[0].text in ("static", "using", "typedef", "friend"):
            return
        elif not declarators:  # a struct or union without a name: its members are those of the outer one
            self.fields.extend(members)
        else:
            for part in split(declarators):
                name = declarator(part)
                if name is not None and not is_bit_field(part):
                    self.fields.append(name.text)
                elif name is not None:
                    self.bit_fields.add(name.text)

    def _input(self, head: Sequence[Token]) -> bool:
        """``uint3 at [[thread_position_in_grid]];`` outside of functions: an input where it is named."""
        if any(t.text in ("{", "(", "=") for t in head):
            return False
        attribute = next((t.text for t in head if t.text in THREAD_ATTRIBUTES), None)
        plain = [t for t in head if t.text not in ("[[", "]]", attribute)]
        name = declarator(plain)
        if attribute is None or name is None or len(plain) < 2:
            return False
        kind = spelling(self.text, [t for t in plain if t is not name])
        self.inputs[name.text] = Parameter(name.text, kind, "thread", attribute, None, name)
        self._blank(head[0].offset, head[-1].end)
        return True

    @staticmethod
    def _mutable(head: Sequence[Token]) -> bool:
        """Whether ``head`` declares numbers, vectors or arrays of such, neither const nor extern."""
        plain = [t for t in head if t.text not in ("static", "inline", "volatile")]
        return (
            len(plain) > 1 and _NUMBER_TYPE.fullmatch(plain[0].text) is not None and plain[1].kind == "name"
        )

    @staticmethod
    def _is_member(head: Sequence[Token]) -> bool:
        """``constant T S::x ...``: a static member of a struct, outside of it."""
        name = declarator(_declarators(head))
        return any(t.text == "::" and after is name for t, after in pairwise(head))

    def _specifiers(self, head: Sequence[Token]) -> Iterator[Token]:
        """The storage and address space words a declaration begins with."""
        i = 0
        while i < len(head):
            if head[i].text == "[[":
                i = closing(head, i)
            elif head[i].text in SPECIFIERS or head[i].text in ADDRESS_SPACES:
                yield head[i]
            else:
                # Also "float constant x": an address space after the type.
                if i + 1 < len(head) and head[i + 1].text in ADDRESS_SPACES and head[i].kind == "name":
                    yield head[i + 1]
                return
            i += 1

    @staticmethod
    def _indirect(head: Sequence[Token]) -> bool:
        """Whether the (first) declarator is a pointer or reference: not storage in that address space."""
        i = 0
        while i < len(head) and head[i].text not in ("=", ",", ";", "{"):
            if head[i].text in ("*", "&", "&&"):
                return True
            if head[i].text in ("[", "[["):
                i = closing(head, i)
            elif head[i].text == "(":
                if i + 1 < len(head) and head[i + 1].text in ("*", "&"):
                    return True
                i = closing(head, i)
            elif head[i].text == "<" and i:
                i = closing_angle(head, i) or i
            i += 1
        return False

    def _storage_only(self, head: Sequence[Token]) -> None:
        token = next(t for t in self._specifiers(head) if t.text == "constant")
        self.found.edits.append(Edit(token.offset, token.end, "const __global"))

    def _constant(self, head: Sequence[Token]) -> None:
        """``constant T x = ...``: storage the compiler allows, and a reference in constant memory to it."""
        parts = split(_declarators(head))
        names = [name for name in map(declarator, parts) if name is not None]
        if len(names) != len(parts):
            return
        specifiers = [t.text for t in head if t.offset < names[0].offset]
        edits = self.found.edits
        self._storage_only(head)
        if "static" not in specifiers:
            edits.append(Edit(head[0].offset, head[0].offset, "static "))
            specifiers.insert(0, "static")
        prefix = "static constexpr" if "constexpr" in specifiers else "static"
        views = [f" {prefix} constant auto& {name.text} = msl_constant({name.text}__msl);" for name in names]
        edits += [Edit(name.offset, name.end, f"{name.text}__msl") for name in names]
        if "{" not in specifiers:  # one declaration each, since the next initialiser may use the name
            again = " ".join("const __global" if word == "constant" else word for word in specifiers)
            for before, part, view in zip(parts, parts[1:], views, strict=False):
                edits.append(Edit(before[-1].end, part[0].offset, f";{view} {again} "))
            views = views[-1:]
        end = self._after(head[-1])
        edits.append(Edit(end, end, "".join(views)))

    def _function_constants(self, head: Sequence[Token], names: tuple[str, ...]) -> None:
        """``constant T x [[function_constant(n)]];``: what it becomes depends on the values given."""
        start = head[0].offset
        attribute: tuple[int, int] | None = None
        plain: list[Token] = []
        i = 0
        while i < len(head):
            if head[i].text == "[[":
                close = closing(head, i)
                if i + 2 < close and head[i + 1].text == "function_constant":
                    attribute = (head[i + 2].end, head[close - 1].offset)
                i = close
            else:
                plain.append(head[i])
            i += 1
        name = declarator(plain)
        if name is None or attribute is None:
            return
        self._add_constant(plain, name, names, start, self._after(head[-1]), index_at=attribute)

    def _made_from_function_constants(self, head: Sequence[Token]) -> bool:
        known = self.found.function_constants
        parts = split(_declarators(head))
        return len(parts) == 1 and any(t.text in known for t in head if t is not declarator(parts[0]))

    def _derived(self, head: Sequence[Token], names: tuple[str, ...], edits: tuple[Edit, ...]) -> None:
        """A constant whose initialiser names function constants: it has a value where they have."""
        name = declarator(_declarators(head))
        if name is None:
            self.found.edits += edits
            return
        uses = frozenset(t.text for t in head if t.text in self.found.function_constants)
        end = self._after(head[-1])
        self._add_constant(head, name, names, head[0].offset, end, uses=uses, edits=edits)

    def _add_constant(
        self, head: Sequence[Token], name: Token, names: tuple[str, ...], start: int, end: int, **more: Any
    ) -> None:
        before = [t for t in head if t.offset < name.offset and t.text not in SPECIFIERS | ADDRESS_SPACES]
        array = any(t.text == "[" for t in head if t.offset > name.offset and t.offset < name.offset + 40)
        qualified = "::" + "::".join((*names, name.text))
        kind = spelling(self.text, before) + ("[]" if array and "edits" in more else "")
        self.found.function_constants[name.text] = FunctionConstant(
            name.text, qualified, kind, name, start, end, **more
        )

    def _after(self, last: Token) -> int:
        """Offset after the ``;`` that follows token ``last``."""
        at = self.text.find(";", last.end)
        return len(self.text) if at < 0 else at + 1

    def _threadgroup(self, head: Sequence[Token]) -> None:
        """``threadgroup T a[4], b;`` becomes a struct in the group's memory and references to its members."""
        parts = split(_declarators(head))
        names = [declarator(part) for part in parts]
        if any(name is None for name in names):
            return
        initialised = next((t for t in head if t.text == "="), None)
        zero = len(parts) == 1 and initialised is not None and self._zero(head, initialised)
        if initialised is not None and zero:  # which is what it gets: nothing, until it is written
            self._blank(initialised.offset, head[-1].end)
        elif initialised is not None:
            self.found.refused.append((initialised, "a threadgroup variable cannot have an initialiser"))
        n, self.storage = self.storage, self.storage + 1
        token = next(t for t in head if t.text == "threadgroup")
        edits = self.found.edits
        edits.append(Edit(head[0].offset, head[0].offset, f"struct msl_storage_{n} {{ "))
        edits.append(Edit(token.offset, token.end, ""))
        references = "".join(f" auto& {name.text} = msl_storage_{n}_.{name.text};" for name in names if name)
        block = f"auto& msl_storage_{n}_ = msl_threadgroup<msl_storage_{n}, {n}>();"
        end = self._after(head[-1])
        edits.append(Edit(end, end, f" }}; {block}{references}"))

    @staticmethod
    def _zero(head: Sequence[Token], equals: Token) -> bool:
        """Whether the initialiser after ``equals`` is ``0``, ``{}`` or ``{0}``."""
        values = [t.text for t in head if t.offset > equals.offset and t.text not in ("{", "}")]
        return values in ([], ["0"], ["0.0"], ["0.0f"], ["0.f"], ["0u"], ["0.0h"])

    # -- words -----------------------------------------------------------------------------------------

    def _words(self) -> None:
        """What is replaced wherever it stands."""
        tokens = self.tokens
        for i, token in enumerate(tokens):
            following = tokens[i + 1].text if i + 1 < len(tokens) else ""
            if token.kind == "number":
                self._literal(token)
            elif token.text == "is_function_constant_defined" and following == "(":
                close = closing(tokens, i + 1)
                asked = tokens[close - 1].text
                self.found.asked.append((token.offset, tokens[close].end, asked))
            elif token.text == "coherent" and self._is_qualifier(i):
                last = tokens[closing(tokens, i + 1)] if following == "(" else token
                self._blank(token.offset, last.end)
            elif token.text == "thread" and self._beside_another_space(i):
                self._blank(token.offset, token.end)

    def _references(self) -> None:
        """``const thread T& x`` takes temporaries too, which the compiler puts nowhere in particular."""
        tokens = self.tokens
        for i, token in enumerate(tokens):
            if token.text != "thread":
                continue
            first, last = i, i + 1
            while first and tokens[first - 1].text in SPECIFIERS:
                first -= 1
            while last < len(tokens) and tokens[last].text in SPECIFIERS:
                last += 1
            kind = last
            while last + 1 < len(tokens) and (tokens[last].kind == "name" or tokens[last].text == "::"):
                last += 1
            if last < len(tokens) and tokens[last].text == "<":
                last = (closing_angle(tokens, last) or last) + 1
            const = any(t.text == "const" for t in tokens[first:last])
            named = last + 1 < len(tokens) and tokens[last + 1].kind == "name"
            following = tokens[min(last + 1 + named, len(tokens) - 1)].text
            if const and tokens[min(last, len(tokens) - 1)].text == "&" and following in (",", ")", "="):
                plain = last == kind + 1 and tokens[kind].text in SCALAR_TYPES
                edit = Edit(token.offset, token.end, " " * len(token.text))
                (self.found.second if plain else self.found.third).append(edit)

    def _offsets(self) -> None:
        """``pointer += x;`` where x is of a class that stands for a number."""
        tokens = self.tokens
        for i in range(1, len(tokens) - 2):
            starts = i == 1 or tokens[i - 2].text in (";", "{", "}", ")", "else", "do")
            if tokens[i].text in ("+=", "-=") and starts and tokens[i - 1].kind == "name":
                end = self._branch_end(i + 1)
                if i + 1 < end < len(tokens):
                    opening = f"msl_offset<decltype({tokens[i - 1].text})>("
                    first, last = tokens[i + 1].offset, tokens[end - 1].end
                    self.found.second += [Edit(first, first, opening), Edit(last, last, ")")]

    def _pragmas(self) -> None:
        """``#pragma unroll (MIN(N, 4))``: no macro is known any more, so it unrolls as the compiler likes."""
        for found in _UNROLL.finditer(self.text):
            self._blank(*found.span(1))

    def _function_pointers(self) -> None:
        """The names of types that are pointers to functions."""
        tokens = self.tokens
        for i, token in enumerate(tokens):
            if token.text == "using" and i + 3 < len(tokens) and tokens[i + 2].text == "=":
                stop = self._statement_end(i, len(tokens))
                words = [t.text for t in tokens[i:stop]]
                if any(words[j : j + 3] == ["(", "*", ")"] for j in range(len(words))):
                    self.pointers.add(tokens[i + 1].text)
            elif token.text == "typedef":
                stop = self._statement_end(i, len(tokens))
                for j in range(i, stop - 4):
                    if tokens[j].text == "(" and tokens[j + 1].text == "*" and tokens[j + 3].text == ")":
                        self.pointers.add(tokens[j + 2].text)

    def _template_parameters(self, first: int, last: int) -> None:
        """A parameter that is a pointer to a function becomes one that is a function: none fits a pointer."""
        for part in split(self.tokens[first:last]):
            name = declarator(part)
            if name is None or len(part) < 2:
                continue
            words = [t.text for t in part]
            star = next((j for j in range(len(words) - 3) if words[j : j + 2] == ["(", "*"]), None)
            if part[0].text in self.pointers and name is not part[0]:
                pointer = self.text[part[0].offset : name.offset].strip()
                self.found.edits.append(Edit(part[0].offset, name.offset, f"msl_function<{pointer}> "))
            elif star is not None and words[star + 3] == ")":
                self.found.edits.append(Edit(part[star].offset, part[star + 3].end, name.text))

    def _literal(self, token: Token) -> None:
        """``1.0`` is a float, also in a template, where the compiler forgets it; ``1.0bf`` is a bfloat."""
        text = token.text
        hexadecimal = text[:2] in ("0x", "0X")
        if text.endswith(("bf", "BF")) and not hexadecimal:
            self.found.edits.append(Edit(token.offset, token.end, f"bfloat({text[:-2]}f)"))
        elif text[-1] not in "fFhHlL" and any(c in text for c in ("pP" if hexadecimal else ".eE")):
            self.found.edits.append(Edit(token.end, token.end, "f"))

    def _is_qualifier(self, i: int) -> bool:
        """Whether ``coherent`` at ``i`` stands among the specifiers of a declaration."""
        tokens = self.tokens
        if i + 1 < len(tokens) and tokens[i + 1].text == "(":
            close = closing(tokens, i + 1)
            return close == i + 3 and tokens[i + 2].text in ("system", "device", "threadgroup")
        around = {tokens[i - 1].text if i else "", tokens[i + 1].text if i + 1 < len(tokens) else ""}
        return bool(around & (ADDRESS_SPACES | {"const", "volatile"}))

    def _beside_another_space(self, i: int) -> bool:
        """Whether ``thread`` at ``i`` qualifies a variable that points to another address space.

        ``thread const device T* p``: every variable of a function is a thread's own.
        """
        tokens = self.tokens
        for step in (1, -1):
            j = i + step
            while 0 <= j < len(tokens) and tokens[j].text in SPECIFIERS:
                j += step
            if 0 <= j < len(tokens) and tokens[j].text in ADDRESS_SPACES - {"thread"}:
                return True
        return False

    def _remove_beyond(self, start: int, stop: int) -> bool:
        """Remove the declaration in tokens ``[start, stop]`` if it uses what is out of scope."""
        if out_of_scope(self.tokens[start : stop + 1], self.beyond) is None:
            return False
        last = self.tokens[min(stop, len(self.tokens) - 1)]
        self._blank(self.tokens[start].offset, last.end)
        return True

    # -- expressions -----------------------------------------------------------------------------------

    def _conditionals(self) -> None:
        """``c ? a : b`` where ``a`` and ``b`` are of one class in two address spaces: see ``msl_branch``."""
        tokens = self.tokens
        self.openings = pairs(tokens)
        angles = [i for i, t in enumerate(tokens) if t.text == "<" and i and tokens[i - 1].kind == "name"]
        lists = [(i, closing_angle(tokens, i) or i) for i in angles]
        for i, token in enumerate(tokens):
            if token.text != "?" or token.kind != "punct":
                continue
            colon = self._branch_end(i + 1)
            if colon >= len(tokens) or tokens[colon].text != ":":
                continue
            if any(first < i < last for first, last in lists):
                continue  # template arguments, or comparisons that look like them
            end = self._branch_end(colon + 1)
            marked = []
            for first, last in ((i + 1, colon), (colon + 1, end)):
                branch = tokens[first:last]
                if any(t.text in self.bit_fields for t in branch):
                    continue  # no reference binds to a bit-field, and none is of a class
                if len(branch) > 1 or (branch and branch[0].kind == "name"):
                    marked.append((first, last))
            if marked:
                self._around(self._condition_start(i), end, "(msl_chosen(), ")
            for first, last in marked:
                self._around(first, last, "(msl_branch(), ")

    def _around(self, first: int, last: int, opening: str) -> None:
        """Put tokens ``[first, last)`` into parentheses, after ``opening``."""
        tokens, edits = self.tokens, self.found.edits
        edits.append(Edit(tokens[first].offset, tokens[first].offset, opening))
        edits.append(Edit(tokens[last - 1].end, tokens[last - 1].end, ")"))

    def _condition_start(self, i: int) -> int:
        """Index of the first token of the conditional expression whose ``?`` is at ``i``."""
        tokens = self.tokens
        j = i - 1
        while j >= 0:
            text = tokens[j].text
            if text in (")", "]", "}") and tokens[j].kind == "punct":
                opening = self.openings.get(j)
                if opening is None or (opening and tokens[opening - 1].text in _CONTROL):
                    break
                j = opening
            elif (tokens[j].kind == "punct" and text in _BEFORE_EXPRESSION) or text in _STATEMENTS:
                break
            j -= 1
        return j + 1

    def _branch_end(self, i: int) -> int:
        """Index of the token that ends the branch of a conditional expression at ``i``."""
        tokens = self.tokens
        inner = 0
        while i < len(tokens):
            text = tokens[i].text
            if text in ("(", "[", "{", "[["):
                i = closing(tokens, i)
            elif text == "?":
                inner += 1
            elif text == ":" and inner:
                inner -= 1
            elif text in (":", ";", ")", "]", "}", "]]") or (text == "," and not inner):
                return i
            i += 1
        return i

    # -- functions -------------------------------------------------------------------------------------

    def _function(
        self,
        start: int,
        head_start: int,
        parameters: tuple[int, int],
        body: int,
        close: int,
        names: tuple[str, ...],
        templated: bool,
        in_struct: bool,
    ) -> None:
        tokens = self.tokens
        head = tokens[start:body]
        name = tokens[parameters[0] - 1]
        if name.text == ">":  # a specialisation: f<int>(...)
            name = next((t for t in reversed(tokens[head_start : parameters[0]]) if t.kind == "name"), name)
        operator = any(t.text == "operator" for t in tokens[head_start : parameters[0]])
        used = {t.text for t in tokens[parameters[0] : close] if t.kind == "name"}
        if not any(t.text == "kernel" for t in head):
            # A helper is handed pointers into memory that others name: what counts is its body.
            used -= ADDRESS_SPACES - {t.text for t in tokens[body:close]}
        self.found.functions.setdefault("operator" if operator else name.text, set()).update(used)
        words = {t.text for t in head[: parameters[0] - start]}
        stage = self._stage(head[: parameters[0] - start])
        if not in_struct and stage is not None and "kernel" not in words:
            self.found.out_of_scope.append((stage, f"{stage.text} functions"))
            self._blank(tokens[start].offset, tokens[close].end)
            return
        if not in_struct and "kernel" not in words and self._remove_beyond(start, close):
            self.beyond.add(name.text)
            return
        read: tuple[Parameter, ...] = ()
        if not in_struct and "kernel" in words:
            read = read_parameters(self.text, tokens[parameters[0] + 1 : parameters[1]])
            taken = {p.name for p in read}
            named = dict.fromkeys(t.text for t in tokens[body:close] if t.text in self.inputs)
            more = [self.inputs[word] for word in named if word not in taken]
            if more:
                place = tokens[parameters[1]].offset
                text = ", ".join(f"{p.type} {p.name}" for p in more)
                self.found.edits.append(Edit(place, place, f"{', ' if read else ''}{text}"))
                read = (*read, *more)
            what = self._beyond_kernel(read, start, close)
            if what is not None:
                self.found.out_of_scope.append(what)
                self._blank(tokens[start].offset, tokens[close].end)
                if templated:
                    self.beyond_templates[name.text] = what
                else:
                    self.found.beyond[host_name(head) or name.text] = what
                return
        if in_struct and name.text == self.struct:
            self._constructor(start, parameters, close)
        elif in_struct:
            self._method(start, head_start, parameters[0], body, tokens[close].end)
        elif head_start < parameters[0] - 2 and tokens[parameters[0] - 2].text == "::":
            self._outer_method(head_start, parameters, body)
        self._body(body + 1, close)
        if in_struct or "kernel" not in words:
            return
        if "void" not in words:
            self.found.refused.append(
                (name, f"kernel '{name.text}' has a result: a kernel is a void function")
            )
        qualified = "::" + "::".join((*names, name.text))
        if templated:
            self.templates[name.text] = (qualified, read, head[0], tokens[close])
        else:
            host = host_name(head) or name.text
            self.found.kernels.append(KernelDeclaration(host, qualified, read, name, head[0], tokens[close]))

    @staticmethod
    def _stage(head: Sequence[Token]) -> Token | None:
        """The word that makes a render function: ``vertex`` in front, or as ``[[vertex]]``."""
        for i, token in enumerate(head):
            if token.text in _STAGES and (i == 0 or head[i - 1].text in ("[[", ">", "static", "inline")):
                return token
        return None

    def _beyond_kernel(
        self, parameters: Sequence[Parameter], start: int, close: int
    ) -> tuple[Token, str] | None:
        """What a kernel uses that is out of scope, and where."""
        for p in parameters:
            if p.role == "unsupported":
                plural = p.attribute if p.attribute.endswith("s") else f"{p.attribute}s"
                return p.token, {"stage_in": "render functions"}.get(p.attribute, plural)
        return out_of_scope(self.tokens[start : close + 1], self.beyond)

    def _body(self, i: int, end: int) -> None:
        """Storage declared inside a function body."""
        tokens = self.tokens
        while i < end:
            starts = i == 0 or tokens[i - 1].text in ("{", "}", ";", ":", ")", "]]", "else", "do")
            if starts and tokens[i].text in SPECIFIERS | ADDRESS_SPACES:
                stop = self._statement_end(i, end)
                head = tokens[i:stop]
                spaces = {t.text for t in self._specifiers(head)}
                if self._indirect(_declarators(head)):
                    pass
                elif "threadgroup" in spaces:
                    self._threadgroup(head)
                elif "constant" in spaces:
                    self._constant(head)
            i += 1

    def _instantiation(self, i: int, end: int, names: tuple[str, ...]) -> int:
        """``template [[host_name("x")]] kernel void f<T>(...);``: a kernel; the compiler needs none of it."""
        tokens = self.tokens
        stop = self._statement_end(i, end)
        head = tokens[i:stop]
        angle = None  # the last template-id outside brackets
        j = 0
        while j < len(head):
            if head[j].text in ("(", "[["):
                j = closing(head, j)
            elif head[j].text == "<" and j and head[j - 1].kind == "name":
                close = closing_angle(head, j)
                if close is not None:
                    angle, j = (j, close), close
            j += 1
        if angle is None and self._deduced(head, names):
            return stop + 1
        template = self.templates.get(head[angle[0] - 1].text) if angle else None
        beyond = self.beyond_templates.get(head[angle[0] - 1].text) if angle else None
        if angle is not None and beyond is not None:
            arguments = self.text[head[angle[0]].offset : head[angle[1]].end]
            self.found.beyond[host_name(head) or f"{head[angle[0] - 1].text}{arguments}"] = beyond
            self._blank(head[0].offset, head[-1].end)
            return stop + 1
        if angle is None or template is None:  # no kernel's, or what the compiler has to refuse
            if len(head) > 1 and head[1].text == "[[":
                start, end = head[1].offset, head[closing(head, 1)].end
                self.found.edits.append(Edit(start, end, " " * (end - start)))
            return stop + 1
        name = head[angle[0] - 1]
        arguments = self.text[head[angle[0]].offset : head[angle[1]].end]
        qualified, read, first, last = template
        host = host_name(head) or f"{name.text}{arguments}"
        self.found.kernels.append(KernelDeclaration(host, f"{qualified}{arguments}", read, name, first, last))
        self.found.functions.setdefault(host, set()).update(t.text for t in head if t.kind == "name")
        self._blank(head[0].offset, head[-1].end)
        return stop + 1

    def _deduced(self, head: Sequence[Token], names: tuple[str, ...]) -> bool:
        """An instantiation that leaves its arguments to the parameters: ``template kernel void f(int);``.

        It becomes a function of its own, which calls the template.
        """
        paren = next(
            (i for i, t in enumerate(head) if t.text == "(" and i and head[i - 1].text in self.templates),
            None,
        )
        if paren is None:
            return False
        name = head[paren - 1]
        _, read, first, last = self.templates[name.text]
        plain = []
        i, close = paren + 1, closing(head, paren)
        while i < close:
            if head[i].text == "[[":
                i = closing(head, i)
            else:
                plain.append(head[i])
            i += 1
        written, arguments = named_parameters(self.text, plain, attributes=False)
        instance = f"msl_instance_{len(self.found.kernels)}"
        function = f"inline void {instance}({written}) {{ {name.text}({arguments}); }}"
        host = host_name(head) or name.text
        expression = "::" + "::".join((*names, instance))
        self.found.kernels.append(KernelDeclaration(host, expression, read, name, first, last))
        self.found.functions.setdefault(host, set()).update(t.text for t in head if t.kind == "name")
        self.found.functions.setdefault(instance, set()).add(name.text)
        self.found.edits.append(Edit(head[0].offset, self._after(head[-1]), function))
        return True

    def _blank(self, start: int, end: int) -> None:
        """Remove what stands in ``[start, end)``, but for its line ends."""
        for piece in self.text[start:end].split("\n"):
            self.found.edits.append(Edit(start, start + len(piece), " " * len(piece)))
            start += len(piece) + 1
