"""A recursive-descent parser of textual LLVM 22 IR, as clang writes it.

Debug records (``#dbg_value`` and the like) are dropped, except that ``#dbg_declare`` gives a function's
``variables``; aliases are dropped. Exceptions, inline assembly, indirect branches, scalable vectors and types
of other targets are refused by IRError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from .errors import IRError
from .instructions import (
    Alloca,
    Argument,
    AtomicRMW,
    Attribute,
    Attributes,
    Binary,
    Branch,
    Call,
    Cast,
    CompareExchange,
    ConditionalBranch,
    ExtractElement,
    ExtractValue,
    FCmp,
    Fence,
    FNeg,
    Freeze,
    GetElementPtr,
    ICmp,
    InsertElement,
    InsertValue,
    Instruction,
    Load,
    Metadata,
    Phi,
    Return,
    Select,
    ShuffleVector,
    Store,
    Switch,
    Terminator,
    Unreachable,
)
from .lexer import Source, Token, unescape
from .module import (
    Block,
    Function,
    GlobalVariable,
    MetadataNode,
    MetadataReference,
    MetadataValue,
    Module,
    Parameter,
)
from .types import (
    ArrayType,
    DataLayout,
    FloatType,
    FunctionType,
    IntType,
    LabelType,
    MetadataType,
    PointerType,
    StructType,
    Type,
    VectorType,
    VoidType,
)
from .values import (
    Aggregate,
    Bytes,
    Constant,
    Expression,
    FloatConstant,
    Global,
    IntConstant,
    Local,
    MetadataOperand,
    NullPointer,
    Poison,
    Splat,
    Undef,
    Value,
    Zero,
    narrow_float_bits,
)

__all__ = ["parse"]

T = TypeVar("T")

_VOID = VoidType()
_BOOL = IntType(1)
_FLOATS = frozenset(("half", "bfloat", "float", "double"))
_TYPE_WORDS = _FLOATS | {"void", "ptr", "label", "metadata"}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NONE: frozenset[str] = frozenset()
_FAST = _words("fast nnan ninf nsz arcp contract afn reassoc")
_BINARY = (
    dict.fromkeys(_words("add sub mul shl"), _words("nuw nsw"))
    | dict.fromkeys(_words("udiv sdiv lshr ashr"), _words("exact"))
    | dict.fromkeys(_words("urem srem and xor"), _NONE)
    | {"or": _words("disjoint")}
    | dict.fromkeys(_words("fadd fsub fmul fdiv frem"), _FAST)
)  # operation -> its flags
_CASTS = (
    dict.fromkeys(_words("sext sitofp fptosi fptoui"), _NONE)
    | dict.fromkeys(_words("bitcast addrspacecast ptrtoint ptrtoaddr inttoptr"), _NONE)
    | {"trunc": _words("nuw nsw"), "zext": _words("nneg"), "uitofp": _words("nneg")}
    | {"fptrunc": _FAST, "fpext": _FAST}
)
_ADDRESS_FLAGS = _words("inbounds nusw nuw")
_CONSTANT_CASTS = _words("trunc bitcast addrspacecast ptrtoint ptrtoaddr inttoptr")
_CONSTANT_BINARY = _words("add sub xor")
_VALUE_WORDS = (
    _words("true false null undef poison none zeroinitializer splat getelementptr asm")
    | _CONSTANT_CASTS
    | _CONSTANT_BINARY
)
_ORDERINGS = _words("unordered monotonic acquire release acq_rel seq_cst")
_INTEGER_PREDICATES = _words("eq ne ugt uge ult ule sgt sge slt sle")
_FLOAT_PREDICATES = _words("false oeq ogt oge olt ole one ord ueq ugt uge ult ule une uno true")
_RMW = _words(
    "xchg add sub and nand or xor max min umax umin fadd fsub fmax fmin fmaximum fminimum"
    " uinc_wrap udec_wrap usub_cond usub_sat"
)
_TYPED_ATTRIBUTES = _words("byval sret byref inalloca preallocated elementtype")
_DEFINITION_ENDS = _words("section partition comdat align gc prefix prologue personality")
_TOP_LEVEL = _words("define declare attributes target")
_BRACKETS = {"(": ")", "{": "}", "[": "]", "<": ">"}


def parse(text: str) -> Module:
    """The module that ``text`` is. Raises IRError, with construct and line, on what is not known."""
    return _Parser(Source(text)).module()


class _Parser:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.tokens = source.tokens
        self.at = 0
        self.layout = DataLayout.parse("")
        self.types: dict[str, StructType] = {}
        self.type_places: dict[str, int] = {}
        self.groups: dict[int, Attributes] = {}

    # tokens

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def advance(self) -> Token:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def peek(self, text: str, ahead: int = 0) -> bool:
        """True if the token ``ahead`` of the next is the word or mark ``text``."""
        token = self.tokens[min(self.at + ahead, len(self.tokens) - 1)]
        return token.text == text and token.kind in ("word", "mark")

    def accept(self, text: str) -> bool:
        found = self.peek(text)
        self.at += found
        return found

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.error(f"{self.shown()} where {text!r} was expected")

    def take(self, kind: str) -> str:
        if self.token.kind != kind:
            raise self.error(f"{self.shown()} where a {kind} was expected")
        return self.advance().text

    def integer(self) -> int:
        return int(self.take("integer"))

    def accept_words(self, known: frozenset[str]) -> tuple[str, ...]:
        """The words of ``known`` that stand next, in order."""
        words = []
        while self.token.kind == "word" and self.token.text in known:
            words.append(self.advance().text)
        return tuple(words)

    def one_of(self, known: frozenset[str], what: str) -> str:
        if self.token.kind != "word" or self.token.text not in known:
            raise self.error(f"the {what} {self.shown()}")
        return self.advance().text

    def shown(self) -> str:
        """The next token, for a message."""
        token = self.token
        return "the end of the text" if token.kind == "end" else repr(self.slice(token.start, token.end))

    def slice(self, start: int, end: int) -> str:
        return self.source.text[start:end]

    def error(self, construct: str, position: int | None = None) -> IRError:
        return IRError(construct, self.source.line(self.token.start if position is None else position))

    def line(self) -> int:
        return self.source.line(self.token.start)

    def parenthesised(self, inner: Callable[[], T]) -> T:
        self.expect("(")
        value = inner()
        self.expect(")")
        return value

    def listed(self, close: str, item: Callable[[], T]) -> tuple[T, ...]:
        """Items separated by commas up to ``close``, which is consumed."""
        items: list[T] = []
        while not self.accept(close):
            if items:
                self.expect(",")
            items.append(item())
        return tuple(items)

    def balanced(self) -> str:
        """The text from an opening bracket, which is next, to its partner."""
        start, open_marks = self.token.start, []
        while True:
            token = self.advance()
            if token.kind == "mark" and token.text in _BRACKETS:
                open_marks.append(_BRACKETS[token.text])
            elif token.kind == "mark" and open_marks and token.text == open_marks[-1]:
                open_marks.pop()
            elif token.kind == "end":
                raise self.error("a bracket that is not closed", start)
            if not open_marks:
                return self.slice(start, token.end)

    # module

    def module(self) -> Module:
        self._find_definitions()
        triple = source = ""
        variables: dict[str, GlobalVariable] = {}
        functions: dict[str, Function] = {}
        comdats: dict[str, str] = {}
        nodes: dict[int, MetadataNode] = {}
        named: dict[str, tuple[int, ...]] = {}
        while self.token.kind != "end":
            match self.token.kind, self.token.text:
                case "word", "source_filename":
                    self.at += 1
                    self.expect("=")
                    source = unescape(self.take("string")).decode("utf-8", "replace")
                case "word", "target":
                    self.at += 1
                    what = self.take("word")
                    self.expect("=")
                    text = self.take("string")
                    if what == "datalayout":
                        self.layout = DataLayout.parse(text)
                    else:
                        triple = text
                case "word", "attributes":  # already read
                    self.at += 3
                    self.balanced()
                case "word", "define" | "declare":
                    function = self.function()
                    functions[function.name] = function
                case "local", name:
                    self.at = self.type_places[name]
                    self.type_body(name)
                case "global", _:
                    variable = self.global_variable()
                    if variable is not None:
                        variables[variable.name] = variable
                case "comdat", name:
                    self.at += 1
                    self.expect("=")
                    self.expect("comdat")
                    comdats[name] = self.take("word")
                case "meta", name if name.isdigit():
                    self.at += 1
                    self.expect("=")
                    nodes[int(name)] = self.metadata_node()
                case "meta", name:
                    self.at += 1
                    self.expect("=")
                    self.take("meta")
                    self.expect("{")
                    named[name] = self.listed("}", lambda: int(self.take("meta")))
                case _:
                    raise self.error(self.shown())
        return Module(
            self.layout, triple, source, self.types, variables, functions, self.groups, comdats, nodes, named
        )

    def _find_definitions(self) -> None:
        """Read the attribute groups, and find the types, which may be used before they are defined."""
        groups = []
        for index, token in enumerate(self.tokens[:-3]):
            first, second = self.tokens[index + 1 : index + 3]
            if token.kind == "local" and (first.text, second.text) == ("=", "type"):
                self.type_places[token.text] = index + 3
            elif token.kind == "word" and token.text == "attributes" and first.kind == "group":
                groups.append(index + 1)
        for index in groups:
            self.at = index
            number = int(self.take("group"))
            self.expect("=")
            self.expect("{")
            attributes = []
            while not self.accept("}"):
                attributes.append(self.attribute())
            self.groups[number] = tuple(attributes)
        for name in self.type_places:
            self.named_type(name)
        self.at = 0

    def named_type(self, name: str) -> StructType:
        if name not in self.types:
            if name not in self.type_places:
                raise self.error(f"the type %{name}, which is not defined")
            here, self.at = self.at, self.type_places[name]
            kind = self.type_body(name)
            self.types[name] = StructType(kind.fields, kind.packed, name)
            self.at = here
        return self.types[name]

    def type_body(self, name: str) -> StructType:
        if self.accept("opaque"):
            return StructType(None)
        kind = self.type()
        if not isinstance(kind, StructType):
            raise self.error(f"the definition of %{name} as {kind}")
        return kind

    # types

    def at_type(self) -> bool:
        token = self.token
        if token.kind == "word":
            return token.text in _TYPE_WORDS or _int_bits(token.text) is not None
        return token.kind == "local" or (token.kind == "mark" and token.text in ("<", "[", "{"))

    def type(self) -> Type:
        token = self.advance()
        match token.kind, token.text:
            case "word", "void":
                return _VOID
            case "word", "ptr":
                return PointerType(self.parenthesised(self.integer) if self.accept("addrspace") else 0)
            case "word", "label":
                return LabelType()
            case "word", "metadata":
                return MetadataType()
            case "word", text if text in _FLOATS:
                return FloatType(text)
            case "word", text if (bits := _int_bits(text)) is not None:
                return IntType(bits)
            case "local", text:
                return self.named_type(text)
            case "mark", "[":
                count = self.integer()
                self.expect("x")
                element = self.type()
                self.expect("]")
                return ArrayType(count, element)
            case "mark", "<":
                if self.accept("{"):
                    fields = self.listed("}", self.type)
                    self.expect(">")
                    return StructType(fields, packed=True)
                if self.peek("vscale"):
                    raise self.error("a scalable vector")
                count = self.integer()
                self.expect("x")
                element = self.type()
                self.expect(">")
                return VectorType(count, element)
            case "mark", "{":
                return StructType(self.listed("}", self.type))
        self.at -= 1
        raise self.error(f"the type {self.shown()}")

    def function_type(self, result: Type) -> FunctionType:
        """A function type whose result has been read."""
        self.expect("(")
        parameters: list[Type] = []
        variadic = False
        while not self.accept(")"):
            if parameters:
                self.expect(",")
            if self.accept("..."):
                variadic = True
            else:
                parameters.append(self.type())
        return FunctionType(result, tuple(parameters), variadic)

    # attributes

    def attribute(self) -> Attribute:
        start = self.token.start
        argument: Type | str | None = None
        if self.token.kind == "string":
            name = self.advance().text
            if self.accept("="):
                argument = self.take("string")
        else:
            name = self.take("word")
            if self.peek("(") and name in _TYPED_ATTRIBUTES:
                argument = self.parenthesised(self.type)
            elif self.peek("("):
                argument = self.balanced()[1:-1]
            elif self.accept("=") or name == "align":  # align=4 in a group, align 4 elsewhere
                argument = self.take("integer")
        return Attribute(name, argument, self.slice(start, self.tokens[self.at - 1].end))

    def attributes(self) -> Attributes:
        """Attributes up to a type, a value or a mark."""
        found = []
        while self.token.kind == "string" or (
            self.token.kind == "word" and self.token.text not in _VALUE_WORDS and not self.at_type()
        ):
            found.append(self.attribute())
        return tuple(found)

    def function_attributes(self, stop: frozenset[str]) -> tuple[Attributes, tuple[int, ...]]:
        """Attributes and attribute groups of a function or call, up to a word of ``stop`` or a mark."""
        found: list[Attribute] = []
        groups: list[int] = []
        while True:
            if self.token.kind == "group":
                groups.append(int(self.advance().text))
            elif self.token.kind == "string" or (self.token.kind == "word" and self.token.text not in stop):
                found.append(self.attribute())
            else:
                return tuple(found), tuple(groups)

    def resolve(self, own: Attributes, groups: tuple[int, ...]) -> Attributes:
        missing = next((group for group in groups if group not in self.groups), None)
        if missing is not None:
            place = self.tokens[self.at - 1].start
            raise self.error(f"the attribute group #{missing}, which is not defined", place)
        return *own, *(attribute for group in groups for attribute in self.groups[group])

    # globals and functions

    def prefix(self, end: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """Words with their arguments (linkage, visibility, calling convention...) up to ``end`` or a type."""
        words = []
        while self.token.kind == "word" and self.token.text not in end and not self.at_type():
            start = self.advance().start
            if self.peek("("):
                self.balanced()
            elif self.token.kind == "integer":  # cc 10
                self.at += 1
            words.append(self.slice(start, self.tokens[self.at - 1].end))
        return tuple(words)

    def global_variable(self) -> GlobalVariable | None:
        line = self.line()
        name = self.take("global")
        self.expect("=")
        prefix = self.prefix(frozenset(("global", "constant", "alias", "ifunc")))
        space = next((int(w[10:-1]) for w in prefix if w.startswith("addrspace(")), 0)
        prefix = tuple(w for w in prefix if not w.startswith("addrspace("))
        what = self.take("word")
        if what == "alias":
            self.type()
            self.expect(",")
            self.typed_value()
            return None
        if what not in ("global", "constant"):
            raise self.error(f"the {what} @{name}")
        kind = self.type()
        external = "external" in prefix or "extern_weak" in prefix
        initializer = None if external else self.constant(kind)
        align, suffix, attached = None, [], []
        while self.accept(","):
            if self.token.kind == "meta":
                attached.append((self.advance().text, int(self.take("meta"))))
            elif self.accept("align"):
                align = self.integer()
            else:
                suffix.append(self.suffix_word())
        return GlobalVariable(
            name, kind, initializer, what == "constant", align, space, prefix, tuple(suffix), tuple(attached),
            line,
        )  # fmt: skip

    def suffix_word(self) -> str:
        """``comdat``, ``section "x"`` and the like, with what stands behind."""
        start = self.token.start
        word = self.take("word")
        if word not in ("comdat", "section", "partition", "align", "gc", "code_model"):
            raise self.error(f"{word!r} on a definition", start)
        if self.peek("("):
            self.balanced()
        elif self.token.kind in ("string", "integer"):
            self.at += 1
        return self.slice(start, self.tokens[self.at - 1].end)

    def function(self) -> Function:
        line = self.line()
        defined = self.take("word") == "define"
        attached = self.attachments(comma=False)
        prefix, result_attributes = _split_prefix(self.prefix_attributes())
        result = self.type()
        name = self.take("global")
        numbers = _Numbers()
        parameters, variadic = self.parameters(numbers)
        suffix = []
        if self.token.text in ("unnamed_addr", "local_unnamed_addr"):
            suffix.append(self.advance().text)
        own, groups = self.function_attributes(_DEFINITION_ENDS | _TOP_LEVEL)
        while self.token.kind == "word" and self.token.text in _DEFINITION_ENDS:
            suffix.append(self.suffix_word())
        attached += self.attachments(comma=False)
        blocks: tuple[Block, ...] = ()
        variables: dict[str, int] = {}
        if defined:
            self.expect("{")
            blocks = self.blocks(numbers, variables)
        return Function(
            name, result, parameters, blocks, self.resolve(own, groups), groups, own, result_attributes,
            variadic, prefix, tuple(suffix), attached, variables, line,
        )  # fmt: skip

    def prefix_attributes(self) -> Attributes:
        """What stands before a result type: linkage and calling convention as well as attributes."""
        found: list[Attribute] = []
        while not self.at_type():
            if self.peek("cc"):
                start = self.advance().start
                self.integer()
                text = self.slice(start, self.tokens[self.at - 1].end)
                found.append(Attribute("cc", None, text))
            else:
                found.append(self.attribute())
        return tuple(found)

    def parameters(self, numbers: _Numbers) -> tuple[tuple[Parameter, ...], bool]:
        self.expect("(")
        found: list[Parameter] = []
        variadic = False
        while not self.accept(")"):
            if found:
                self.expect(",")
            if self.accept("..."):
                variadic = True
                continue
            kind = self.type()
            attributes = self.attributes()
            name = self.advance().text if self.token.kind == "local" else None
            found.append(Parameter(kind, numbers.name(name), attributes))
        return tuple(found), variadic

    def blocks(self, numbers: _Numbers, variables: dict[str, int]) -> tuple[Block, ...]:
        blocks = []
        while not self.accept("}"):
            label = numbers.name(self.advance().text if self.token.kind == "label" else None)
            instructions: list[Instruction] = []
            while not instructions or not isinstance(instructions[-1], Terminator):
                if self.token.kind == "record":
                    self.debug_record(variables)
                    continue
                instructions.append(self.instruction(numbers))
            blocks.append(Block(label, tuple(instructions)))
        labels = {block.label for block in blocks}
        for block in blocks:
            for target in block.terminator.successors:
                if target not in labels:
                    raise IRError(f"a branch to %{target}, which is no block", block.terminator.line)
        return tuple(blocks)

    def debug_record(self, variables: dict[str, int]) -> None:
        declares = self.advance().text == "dbg_declare"
        if (
            declares
            and self.tokens[self.at + 1].text == "ptr"
            and self.tokens[self.at + 2].kind == "local"
            and self.tokens[self.at + 4].kind == "meta"
        ):
            variables[self.tokens[self.at + 2].text] = int(self.tokens[self.at + 4].text)
        self.balanced()

    # values

    def typed_value(self) -> Value:
        return self.value(self.type())

    def value(self, kind: Type) -> Value:
        if self.token.kind == "local":
            return Local(kind, self.advance().text)
        if isinstance(kind, MetadataType):
            return MetadataOperand(kind, self.metadata_text())
        return self.constant(kind)

    def typed_constant(self) -> Constant:
        return self.constant(self.type())

    def constant(self, kind: Type) -> Constant:
        token = self.advance()
        match token.kind, token.text:
            case "global", name:
                return Global(kind, name)
            case "integer", text if isinstance(kind, IntType):
                return _int_constant(kind, int(text))
            case (("integer" | "decimal" | "hex"), text) if isinstance(kind, FloatType):
                bits = _float_bits(kind, text)
                if bits is None:
                    raise self.error(f"the {kind} constant {text}", token.start)
                return FloatConstant(kind, bits)
            case "word", ("true" | "false") as text if kind == _BOOL:
                return IntConstant(_BOOL, int(text == "true"))
            case "word", "null":
                return NullPointer(kind)
            case "word", "undef":
                return Undef(kind)
            case "word", "poison":
                return Poison(kind)
            case "word", "zeroinitializer":
                return Zero(kind)
            case "word", "splat" if isinstance(kind, VectorType):
                return Splat(kind, self.parenthesised(self.typed_constant))
            case "word", operation if operation in _VALUE_WORDS:
                self.at -= 1
                return self.expression(kind)
            case "bytes", text if isinstance(kind, ArrayType):
                return Bytes(kind, unescape(text))
            case "mark", "[" if isinstance(kind, ArrayType):
                return Aggregate(kind, self.listed("]", self.typed_constant))
            case "mark", "{" if isinstance(kind, StructType):
                return Aggregate(kind, self.listed("}", self.typed_constant))
            case "mark", "<" if isinstance(kind, StructType):
                self.expect("{")
                elements = self.listed("}", self.typed_constant)
                self.expect(">")
                return Aggregate(kind, elements)
            case "mark", "<" if isinstance(kind, VectorType):
                return Aggregate(kind, self.listed(">", self.typed_constant))
        self.at -= 1
        raise self.error(f"the {kind} constant {self.shown()}")

    def expression(self, kind: Type) -> Expression:
        operation = self.token.text
        if operation == "getelementptr":
            self.at += 1
            flags = self.accept_words(_ADDRESS_FLAGS)
            self.expect("(")
            source = self.type()
            self.expect(",")
            return Expression(kind, operation, self.listed(")", self.typed_constant), flags, source)
        if operation in _CONSTANT_CASTS:
            self.at += 1
            self.expect("(")
            operand = self.typed_constant()
            self.expect("to")
            target = self.type()
            self.expect(")")
            return Expression(target, operation, (operand,))
        if operation in _CONSTANT_BINARY:
            self.at += 1
            flags = self.accept_words(_words("nuw nsw"))
            self.expect("(")
            return Expression(kind, operation, self.listed(")", self.typed_constant), flags)
        raise self.error(f"the constant {operation!r}")

    # instructions

    def instruction(self, numbers: _Numbers) -> Instruction:
        token = self.token
        line = self.source.line(token.start)
        name = None
        if token.kind == "local":
            self.at += 1
            name = token.text
            self.expect("=")
            token = self.token
        if token.kind != "word":
            raise self.error(f"the instruction {self.shown()}")
        self.at += 1
        build = self.build(token)
        metadata = self.attachments(comma=True)
        if name is not None or build.type != _VOID:
            name = numbers.name(name)
        return replace(build, name=name, metadata=metadata, line=line)

    def build(self, token: Token) -> Instruction:
        operation = token.text
        if operation in _BINARY:
            flags = self.accept_words(_BINARY[operation])
            lhs, rhs = self.pair()
            return Binary(type=lhs.type, operation=operation, lhs=lhs, rhs=rhs, flags=flags)
        if operation in _CASTS:
            flags = self.accept_words(_CASTS[operation])
            value = self.typed_value()
            self.expect("to")
            return Cast(type=self.type(), operation=operation, value=value, flags=flags)
        if operation in ("call", "tail", "musttail", "notail"):
            return self.call("" if operation == "call" else operation)
        method: Callable[[], Instruction] | None = getattr(self, f"build_{operation}", None)
        if method is None:
            raise self.error(f"the instruction {operation!r}", token.start)
        return method()

    def pair(self) -> tuple[Value, Value]:
        """Two operands of one type, which is written once."""
        lhs = self.typed_value()
        self.expect(",")
        return lhs, self.value(lhs.type)

    def next_value(self) -> Value:
        self.expect(",")
        return self.typed_value()

    def label(self) -> str:
        self.expect("label")
        return self.take("local")

    def more(self, word: str) -> bool:
        """Accept a comma and ``word`` behind it."""
        found = self.peek(",") and self.peek(word, 1)
        self.at += 2 * found
        return found

    def align_or(self, kind: Type) -> int:
        """``, align N``, else the type's own alignment."""
        return self.integer() if self.more("align") else self.layout.align(kind)

    def scope(self) -> str | None:
        return self.parenthesised(lambda: self.take("string")) if self.accept("syncscope") else None

    def ordering(self) -> str:
        return self.one_of(_ORDERINGS, "memory ordering")

    def build_fneg(self) -> Instruction:
        flags = self.accept_words(_FAST)
        value = self.typed_value()
        return FNeg(type=value.type, value=value, flags=flags)

    def build_freeze(self) -> Instruction:
        value = self.typed_value()
        return Freeze(type=value.type, value=value)

    def build_icmp(self) -> Instruction:
        flags = self.accept_words(_words("samesign"))
        predicate = self.one_of(_INTEGER_PREDICATES, "predicate")
        lhs, rhs = self.pair()
        return ICmp(type=_truth(lhs.type), predicate=predicate, lhs=lhs, rhs=rhs, flags=flags)

    def build_fcmp(self) -> Instruction:
        flags = self.accept_words(_FAST)
        predicate = self.one_of(_FLOAT_PREDICATES, "predicate")
        lhs, rhs = self.pair()
        return FCmp(type=_truth(lhs.type), predicate=predicate, lhs=lhs, rhs=rhs, flags=flags)

    def build_select(self) -> Instruction:
        flags = self.accept_words(_FAST)
        condition = self.typed_value()
        then, otherwise = self.next_value(), self.next_value()
        return Select(type=then.type, condition=condition, then=then, otherwise=otherwise, flags=flags)

    def build_phi(self) -> Instruction:
        flags = self.accept_words(_FAST)
        kind = self.type()
        incoming: list[tuple[Value, str]] = []
        while not incoming or (self.peek(",") and self.peek("[", 1)):
            if incoming:
                self.expect(",")
            self.expect("[")
            value = self.value(kind)
            self.expect(",")
            incoming.append((value, self.take("local")))
            self.expect("]")
        return Phi(type=kind, incoming=tuple(incoming), flags=flags)

    def build_alloca(self) -> Instruction:
        if self.peek("inalloca") or self.peek("swifterror"):
            raise self.error(f"the alloca flag {self.token.text!r}")
        kind = self.type()
        count, align, space = None, None, 0
        while self.peek(",") and self.tokens[self.at + 1].kind != "meta":
            if self.more("align"):
                align = self.integer()
            elif self.more("addrspace"):
                space = self.parenthesised(self.integer)
            else:
                count = self.next_value()
        align = self.layout.align(kind) if align is None else align
        return Alloca(type=PointerType(space), allocated=kind, align=align, count=count, address_space=space)

    def build_load(self) -> Instruction:
        atomic, volatile = self.accept("atomic"), self.accept("volatile")
        kind = self.type()
        pointer = self.next_value()
        scope = self.scope()
        ordering = self.ordering() if atomic else None
        align = self.align_or(kind)
        return Load(
            type=kind, pointer=pointer, align=align, volatile=volatile, ordering=ordering, scope=scope,
        )  # fmt: skip

    def build_store(self) -> Instruction:
        atomic, volatile = self.accept("atomic"), self.accept("volatile")
        value = self.typed_value()
        pointer = self.next_value()
        scope = self.scope()
        ordering = self.ordering() if atomic else None
        align = self.align_or(value.type)
        return Store(
            type=_VOID, value=value, pointer=pointer, align=align,
            volatile=volatile, ordering=ordering, scope=scope,
        )  # fmt: skip

    def build_getelementptr(self) -> Instruction:
        flags = self.accept_words(_ADDRESS_FLAGS)
        source = self.type()
        pointer = self.next_value()
        indices = []
        while self.peek(",") and self.tokens[self.at + 1].kind != "meta":
            indices.append(self.next_value())
        wide = next((v.type for v in (pointer, *indices) if isinstance(v.type, VectorType)), None)
        kind = pointer.type
        if wide is not None and not isinstance(kind, VectorType):
            kind = VectorType(wide.count, kind)
        return GetElementPtr(type=kind, source=source, pointer=pointer, indices=tuple(indices), flags=flags)

    def vector(self, value: Value) -> VectorType:
        if not isinstance(value.type, VectorType):
            raise self.error(f"{value.type} where a vector was expected")
        return value.type

    def build_extractelement(self) -> Instruction:
        vector, index = self.typed_value(), self.next_value()
        return ExtractElement(type=self.vector(vector).element, vector=vector, index=index)

    def build_insertelement(self) -> Instruction:
        vector, element, index = self.typed_value(), self.next_value(), self.next_value()
        return InsertElement(type=self.vector(vector), vector=vector, element=element, index=index)

    def build_shufflevector(self) -> Instruction:
        lhs, rhs, mask = self.typed_value(), self.next_value(), self.next_value()
        lanes = self.mask(mask)
        kind = VectorType(len(lanes), self.vector(lhs).element)
        return ShuffleVector(type=kind, lhs=lhs, rhs=rhs, mask=lanes)

    def mask(self, mask: Value) -> tuple[int | None, ...]:
        count = self.vector(mask).count
        match mask:
            case Zero():
                return (0,) * count
            case Poison() | Undef():
                return (None,) * count
            case Splat(element=IntConstant(value=value)):
                return (value,) * count
            case Aggregate(elements=elements):
                return tuple(e.value if isinstance(e, IntConstant) else None for e in elements)
        raise self.error(f"the shuffle mask {mask}")

    def indices(self) -> tuple[int, ...]:
        found = []
        while self.peek(",") and self.tokens[self.at + 1].kind == "integer":
            self.at += 1
            found.append(self.integer())
        return tuple(found)

    def build_extractvalue(self) -> Instruction:
        aggregate = self.typed_value()
        indices = self.indices()
        kind = aggregate.type
        for index in indices:
            kind = self.layout.element(kind, index)[1]
        return ExtractValue(type=kind, aggregate=aggregate, indices=indices)

    def build_insertvalue(self) -> Instruction:
        aggregate, element = self.typed_value(), self.next_value()
        return InsertValue(type=aggregate.type, aggregate=aggregate, element=element, indices=self.indices())

    def build_atomicrmw(self) -> Instruction:
        volatile = self.accept("volatile")
        operation = self.one_of(_RMW, "atomic operation")
        pointer, value = self.typed_value(), self.next_value()
        scope, ordering = self.scope(), self.ordering()
        align = self.integer() if self.more("align") else self.layout.store_size(value.type)
        return AtomicRMW(
            type=value.type, operation=operation, pointer=pointer, value=value, ordering=ordering,
            align=align, volatile=volatile, scope=scope,
        )  # fmt: skip

    def build_cmpxchg(self) -> Instruction:
        weak, volatile = self.accept("weak"), self.accept("volatile")
        pointer, expected, replacement = self.typed_value(), self.next_value(), self.next_value()
        scope, ordering, failure = self.scope(), self.ordering(), self.ordering()
        align = self.integer() if self.more("align") else self.layout.store_size(expected.type)
        return CompareExchange(
            type=StructType((expected.type, _BOOL)), pointer=pointer, expected=expected,
            replacement=replacement, ordering=ordering, failure_ordering=failure,
            align=align, weak=weak, volatile=volatile, scope=scope,
        )  # fmt: skip

    def build_fence(self) -> Instruction:
        scope = self.scope()
        return Fence(type=_VOID, ordering=self.ordering(), scope=scope)

    def call(self, tail: str) -> Instruction:
        if tail:
            self.expect("call")
        flags = self.accept_words(_FAST)
        prefix, result_attributes = _split_prefix(self.prefix_attributes())
        result = self.type()
        signature = self.function_type(result) if self.peek("(") else None
        if self.peek("asm"):
            raise self.error("inline assembly")
        callee = self.value(PointerType())
        self.expect("(")
        arguments = self.listed(")", self.argument)
        own, groups = self.function_attributes(frozenset(_OPCODES))
        if self.peek("["):
            raise self.error("an operand bundle")
        return Call(
            type=result, callee=callee, arguments=arguments, tail=tail, flags=flags,
            convention=" ".join(prefix), result_attributes=result_attributes, signature=signature,
            attributes=self.resolve(own, groups), groups=groups, own_attributes=own,
        )  # fmt: skip

    def argument(self) -> Argument:
        kind = self.type()
        attributes = self.attributes()
        return Argument(self.value(kind), attributes)

    def build_ret(self) -> Instruction:
        kind = self.type()
        return Return(type=_VOID, value=None if kind == _VOID else self.value(kind))

    def build_br(self) -> Instruction:
        if self.peek("label"):
            return Branch(type=_VOID, target=self.label())
        condition = self.typed_value()
        self.expect(",")
        then = self.label()
        self.expect(",")
        return ConditionalBranch(type=_VOID, condition=condition, then=then, otherwise=self.label())

    def build_switch(self) -> Instruction:
        value = self.typed_value()
        self.expect(",")
        default = self.label()
        self.expect("[")
        cases = []
        while not self.accept("]"):
            case = self.typed_constant()
            if not isinstance(case, IntConstant):
                raise self.error(f"the switch case {case}")
            self.expect(",")
            cases.append((case, self.label()))
        return Switch(type=_VOID, value=value, default=default, cases=tuple(cases))

    def build_unreachable(self) -> Instruction:
        return Unreachable(type=_VOID)

    # metadata

    def attachments(self, *, comma: bool) -> Metadata:
        """``!kind !node`` pairs, each after a comma if they follow an instruction."""
        found = []
        while (self.tokens[self.at + 1] if comma and self.peek(",") else self.token).kind == "meta":
            if self.at_metadata_definition():  # after a declaration the next definition may be metadata
                break
            self.at += comma
            kind = self.take("meta")
            found.append((kind, int(self.take("meta"))))
        return tuple(found)

    def at_metadata_definition(self) -> bool:
        return self.token.kind == "meta" and self.peek("=", 1)

    def metadata_text(self) -> str:
        start = self.token.start
        if self.token.kind == "meta":
            self.at += 1
            if self.token.kind == "string":
                self.at += 1
            elif self.peek("{") or self.peek("("):
                self.balanced()
        else:
            self.typed_value()
        return self.slice(start, self.tokens[self.at - 1].end)

    def metadata_node(self) -> MetadataNode:
        start = self.token.start
        distinct = self.accept("distinct")
        kind = self.take("meta")
        operands: list[MetadataValue] = []
        fields: dict[str, MetadataValue] = {}
        close = "}" if self.accept("{") else ")"
        if close == ")":
            self.expect("(")
        first = True
        while not self.accept(close):
            if not first:
                self.expect(",")
            first = False
            if self.token.kind == "label":
                name = self.advance().text
                fields[name] = self.metadata_value()
            else:
                operands.append(self.metadata_value())
        text = self.slice(start, self.tokens[self.at - 1].end)
        return MetadataNode(kind, tuple(operands), fields, distinct, text)

    def metadata_value(self) -> MetadataValue:
        match self.token.kind, self.token.text:
            case "meta", text if text.isdigit():
                self.at += 1
                return MetadataReference(int(text))
            case "meta", "" if self.tokens[self.at + 1].kind == "string":
                self.at += 1
                return self.string()
            case "meta", _:
                return self.metadata_node()
            case "string", _:
                return self.string()
            case "integer", text:
                self.at += 1
                return int(text)
            case "word", "null":
                self.at += 1
                return None
            case "word", ("true" | "false") as text:
                self.at += 1
                return text == "true"
        if self.at_type():
            return self.typed_value()
        words = [self.take("word")]
        while self.accept("|"):
            words.append(self.take("word"))
        return " | ".join(words)

    def string(self) -> str:
        return unescape(self.take("string")).decode("utf-8", "replace")


class _Numbers:
    """Gives numbers to what has no name, as LLVM does: parameters, blocks and results share one count."""

    def __init__(self) -> None:
        self.next = 0

    def name(self, given: str | None) -> str:
        if given is None or given == str(self.next):
            given = str(self.next)
            self.next += 1
        return given


_OPCODES = frozenset(
    [*_BINARY, *_CASTS, "call", "tail", "musttail", "notail"]
    + [name.removeprefix("build_") for name in vars(_Parser) if name.startswith("build_")]
)
_PREFIX_WORDS = _words(
    "private internal available_externally linkonce weak common appending extern_weak linkonce_odr weak_odr"
    " external dso_local dso_preemptable default hidden protected dllimport dllexport"
    " ccc fastcc coldcc tailcc swiftcc spir_func spir_kernel cc"
)


def _split_prefix(found: Attributes) -> tuple[tuple[str, ...], Attributes]:
    """Linkage and calling convention apart from the attributes of the result."""
    prefix = tuple(a.text for a in found if a.name in _PREFIX_WORDS)
    return prefix, tuple(a for a in found if a.name not in _PREFIX_WORDS)


def _int_bits(text: str) -> int | None:
    return int(text[1:]) if text[0] == "i" and text[1:].isdigit() else None


def _truth(kind: Type) -> Type:
    """Type of a comparison of two values of ``kind``."""
    return VectorType(kind.count, _BOOL) if isinstance(kind, VectorType) else _BOOL


def _int_constant(kind: IntType, value: int) -> IntConstant:
    if kind.bits == 1:
        return IntConstant(kind, value & 1)
    wrapped = value & ((1 << kind.bits) - 1)
    return IntConstant(kind, wrapped - (1 << kind.bits) if wrapped >> (kind.bits - 1) else wrapped)


def _float_bits(kind: FloatType, text: str) -> int | None:
    """The pattern of a constant; None where the text gives none of that type exactly."""
    prefix = {"half": "0xH", "bfloat": "0xR"}.get(kind.kind)
    if text.startswith("0x"):
        if prefix is not None:
            return int(text[3:], 16) if text.startswith(prefix) else None
        wide = int(text, 16) if text[2] not in "HRKLM" else None
    else:
        wide = int.from_bytes(struct.pack("<d", float(text)), "little")
    if wide is None or kind.kind == "double":
        return wide
    if kind.kind == "float":
        return narrow_float_bits(wide)
    return None  # LLVM writes half and bfloat in hexadecimal only
