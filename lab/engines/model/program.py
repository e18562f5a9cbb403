"""A module turned into Python closures, one per instruction, over registers as ``threads`` describes them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from ... import ir
from . import operations as op
from .collectives import LANE, STORAGE, primitive
from .errors import TrapError, Unmodelled
from .intrinsics import NOTHING, compute
from .memory import Codec, Memory, Object, codec
from .threads import (
    NO_RESULT,
    CompiledBlock,
    CompiledFunction,
    Edge,
    Invoke,
    Leave,
    Meet,
    Operation,
    Registers,
)

__all__ = ["Program"]

_ADDRESS_MASK = (1 << 64) - 1


class Program:
    """A module in a memory: its globals placed, its functions compiled when they are first called."""

    def __init__(self, module: ir.Module, memory: Memory) -> None:
        self.module = module
        self.memory = memory
        self.layout = module.layout
        self._codecs: dict[ir.Type, Codec] = {}
        self._compiled: dict[str, CompiledFunction] = {}
        self._by_address: dict[int, str] = {}
        self._globals: dict[str, Object] = {}
        self._place_globals()

    # globals and constants

    def _place_globals(self) -> None:
        for name in self.module.functions:
            placed = self.memory.add(f"the function {name}", bytearray(), read_only=True)
            self._globals[name] = placed
            self._by_address[placed.address] = name
        for name, variable in self.module.globals.items():
            if variable.prefix and "appending" in variable.prefix:
                continue  # llvm.global_ctors, llvm.used
            if variable.initializer is None:
                raise Unmodelled(f"the external variable {name}")
            data = bytearray(self.layout.size(variable.type))
            self._globals[name] = self.memory.add(f"the program's variable {name}", data)
        for name, variable in self.module.globals.items():
            if name in self._globals and variable.initializer is not None:
                content = self.codec(variable.type).encode(self.evaluate(variable.initializer))
                self._globals[name].data[: len(content)] = content

    def constructors(self) -> list[str]:
        """Functions that initialise globals, in the order in which they must run."""
        table = self.module.globals.get("llvm.global_ctors")
        found: list[tuple[int, str]] = []
        if table is not None and isinstance(table.initializer, ir.Aggregate):
            for entry in table.initializer.elements:
                match entry:
                    case ir.Aggregate(elements=(ir.IntConstant(value=priority), ir.Global(name=name), *_)):
                        found.append((priority, name))
        return [name for _, name in sorted(found, key=lambda pair: pair[0])]

    def seal(self) -> None:
        """Make the globals read only."""
        for placed in self._globals.values():
            placed.read_only = True

    def codec(self, kind: ir.Type) -> Codec:
        known = self._codecs.get(kind)
        if known is None:
            known = self._codecs[kind] = codec(self.layout, kind)
        return known

    def evaluate(self, constant: ir.Value) -> Any:
        """The value of a constant; what is undefined is zero."""
        match constant:
            case ir.IntConstant():
                return constant.unsigned
            case ir.FloatConstant(type=kind, bits=bits):
                return op.format_of(kind).decode(bits)
            case ir.Aggregate(elements=elements):
                return tuple(map(self.evaluate, elements))
            case ir.Bytes(data=data):
                return tuple(data)
            case ir.Splat(type=kind, element=element):
                return (self.evaluate(element),) * kind.count
            case ir.Global(name=name):
                if name not in self._globals:
                    raise Unmodelled(f"the address of {name}")
                return self._globals[name].address
            case ir.Expression():
                return self._expression(constant)
            case ir.NullPointer() | ir.Undef() | ir.Poison() | ir.Zero():
                return self.codec(constant.type).zero
        raise Unmodelled(f"the constant {constant}")

    def _expression(self, expression: ir.Expression) -> Any:
        values = [self.evaluate(operand) for operand in expression.operands]
        if expression.operation == "getelementptr":
            assert expression.source is not None
            terms = self.address_terms(expression.source, expression.operands[1:])
            return self.address(values[0], terms, values[1:])
        if len(values) == 1:
            source, target = expression.operands[0].type, expression.type
            return op.cast(expression.operation, source, target, self.address_bits(source, target))(*values)
        assert isinstance(expression.type, ir.IntType)
        return op.integer(expression.operation, expression.type.bits)(*values)

    def address_bits(self, *kinds: ir.Type) -> int:
        """Bits of the pointer among ``kinds``, of a plain one if there is none."""
        return self.layout.bits(next((k for k in kinds if isinstance(k, ir.PointerType)), ir.PointerType()))

    def address_terms(self, source: ir.Type, indices: Sequence[ir.Value]) -> list[tuple[int, int]]:
        """For each index of a getelementptr the bytes it counts, and its bits; -1 bytes: a field's offset,
        which stands in place of the bits."""
        terms: list[tuple[int, int]] = []
        kind = source
        for number, index in enumerate(indices):
            index_type = index.type.element if isinstance(index.type, ir.VectorType) else index.type
            assert isinstance(index_type, ir.IntType)
            if number == 0:
                terms.append((self.layout.size(kind), index_type.bits))
            elif isinstance(kind, ir.StructType):
                field = index.element if isinstance(index, ir.Splat) else index
                if not isinstance(field, ir.IntConstant):
                    raise Unmodelled(f"an index of {kind} that is no constant")
                offset, kind = self.layout.element(kind, field.value)
                terms.append((-1, offset))
            else:
                kind = self.layout.element(kind, 0)[1]
                terms.append((self.layout.size(kind), index_type.bits))
        return terms

    @staticmethod
    def address(base: int, terms: Sequence[tuple[int, int]], indices: Sequence[int]) -> int:
        """``base`` moved by ``indices``, as ``address_terms`` describes them."""
        for (step, extra), index in zip(terms, indices, strict=True):
            base += extra if step < 0 else step * op.signed(index, extra)
        return base & _ADDRESS_MASK

    # functions

    def prepare(self, name: str) -> CompiledFunction:
        """Compile a function and all that it can call by name. Raises Unmodelled before anything runs."""
        work, seen = [name], {name}
        while work:
            self.function(work[-1])
            for called in sorted(self._calls[work.pop()] - seen):
                callee = self.module.functions.get(called)
                if callee is not None and not callee.is_declaration:
                    seen.add(called)
                    work.append(called)
        return self.function(name)

    def function(self, name: str) -> CompiledFunction:
        """The compiled function of that name. Raises Unmodelled if it is none of the module."""
        known = self._compiled.get(name)
        if known is None:
            source = self.module.functions.get(name)
            if source is None or source.is_declaration:
                raise Unmodelled(f"the function {name}, which the program does not define")
            known = self._compiled[name] = _Compiler(self, source).compile()
        return known

    def function_at(self, address: int) -> str:
        """The name of the function that a call of an address means."""
        name = self._by_address.get(address)
        if name is None:
            raise TrapError("a call of an address that is no function")
        return name

    @functools.cached_property
    def _calls(self) -> dict[str, set[str]]:
        """For each function the names it calls; the empty name stands for a call of an address."""
        calls: dict[str, set[str]] = {}
        for function in self.module.functions.values():
            instructions = [i for block in function.blocks for i in block.instructions]
            callees = [i.callee for i in instructions if isinstance(i, ir.Call)]
            calls[function.name] = {c.name if isinstance(c, ir.Global) else "" for c in callees}
        return calls

    @functools.cached_property
    def meeting(self) -> frozenset[str]:
        """Functions in which a primitive can be called, by themselves or through others."""
        meeting = {name for name in self._calls if primitive(name) is not None}
        more = meeting and {""}  # behind an address any function can be
        while more:
            meeting |= more
            more = {name for name, called in self._calls.items() if name not in meeting and called & meeting}
        return frozenset(meeting)


class _Compiler:
    """Compiles one function."""

    def __init__(self, program: Program, function: ir.Function) -> None:
        self.program = program
        self.layout = program.layout
        self.function = function
        self.template: Registers = [None]
        self.registers: dict[ir.Value, int] = {}
        self.flow = self._control_flow()
        self.loops = {loop: number for number, loop in enumerate(self.flow.loops)} if self.flow else {}
        self.blocks: dict[str, CompiledBlock] = {}

    def _control_flow(self) -> ir.ControlFlow | None:
        if self.function.name not in self.program.meeting:
            return None
        flow = ir.ControlFlow.of(self.function, ir.loops_of_source(self.program.module, self.function))
        if flow.irreducible:
            label = flow.irreducible[0]
            raise self.unmodelled(
                f"{self.function.name}, in which lanes meet under irreducible control flow (block %{label})",
                self.function.block[label].terminator,
            )
        return flow

    def unmodelled(self, what: str, instruction: ir.Instruction) -> Unmodelled:
        return Unmodelled(what, self.program.module.location(instruction))

    def compile(self) -> CompiledFunction:
        parameters = [self.register(parameter.value) for parameter in self.function.parameters]
        copied = []
        for register, parameter in zip(parameters, self.function.parameters, strict=True):
            attribute = ir.find_attribute(parameter.attributes, "byval")
            if attribute is not None and attribute.argument is not None:
                assert not isinstance(attribute.argument, str)
                copied.append((register, self.layout.size(attribute.argument)))
        for block in self.function.blocks:
            around = () if self.flow is None else self.flow.around(block.label)
            loops = tuple(self.loops[loop] for loop in around)
            self.blocks[block.label] = CompiledBlock(block.label, loops, [], [])
        for block in self.function.blocks:
            compiled = self.blocks[block.label]
            for instruction in block.instructions:
                if not isinstance(instruction, ir.Phi):
                    compiled.operations.append(self.operation(instruction, block))
                    compiled.instructions.append(instruction)
        entry = self.blocks[self.function.entry.label]
        return CompiledFunction(
            self.function.name, self.flow, len(self.loops), entry, self.template, parameters, copied
        )

    def register(self, value: ir.Value) -> int:
        """The register that holds a value; constants are put there now."""
        known = self.registers.get(value)
        if known is None:
            known = self.registers[value] = len(self.template)
            is_constant = not isinstance(value, ir.Local | ir.MetadataOperand)
            self.template.append(self.program.evaluate(value) if is_constant else None)
        return known

    def result(self, instruction: ir.Instruction) -> int:
        return NO_RESULT if instruction.name is None else self.register(instruction.result)

    # instructions

    def operation(self, instruction: ir.Instruction, block: ir.Block) -> Operation:
        match instruction:
            case ir.Binary(operation=operation, lhs=lhs):
                element = _element(lhs.type)
                if isinstance(element, ir.IntType):
                    function: Callable[..., Any] = op.integer(operation, element.bits)
                else:
                    function = op.format_of(element).arithmetic(operation)
                return self.apply(instruction, function, op.UNDEFINABLE.get(operation))
            case ir.ICmp(predicate=predicate, lhs=lhs):
                return self.apply(instruction, op.compare_integers(predicate, self.bits(_element(lhs.type))))
            case ir.FCmp(predicate=predicate):
                return self.apply(instruction, op.compare_floats(predicate))
            case ir.FNeg():
                return self.apply(instruction, operator.neg)
            case ir.Freeze():
                return self.apply(instruction, lambda value: value)
            case ir.Cast():
                return self.cast(instruction)
            case ir.Select():
                return self.select(instruction)
            case ir.Alloca():
                return self.alloca(instruction)
            case ir.Load():
                return self.load(instruction)
            case ir.Store():
                return self.store(instruction)
            case ir.GetElementPtr():
                return self.address(instruction)
            case ir.ExtractElement() | ir.InsertElement() | ir.ShuffleVector():
                return self.vector(instruction)
            case ir.ExtractValue() | ir.InsertValue():
                return self.aggregate(instruction)
            case ir.AtomicRMW() | ir.CompareExchange():
                return self.atomic(instruction)
            case ir.Fence():
                return _nothing
            case ir.Call():
                return self.call(instruction)
            case ir.Terminator():
                return self.terminator(instruction, block)
        raise self.unmodelled(f"the instruction `{instruction}`", instruction)

    def bits(self, kind: ir.Type) -> int:
        return self.layout.bits(kind)

    def apply(
        self, instruction: ir.Instruction, function: Callable[..., Any], undefined: str | None = None
    ) -> Operation:
        """``function`` of the operands, element by element of vectors, to the result."""
        count = instruction.type.count if isinstance(instruction.type, ir.VectorType) else None
        if count is not None and not isinstance(instruction, ir.Freeze):
            scalar = function

            def function(*vectors: Any) -> Any:
                return tuple(map(scalar, *vectors))

        return self.set(instruction, function, instruction.operands, undefined)

    def set(
        self,
        instruction: ir.Instruction,
        function: Callable[..., Any],
        operands: Sequence[ir.Value],
        undefined: str | None = None,
    ) -> Operation:
        """``function`` of whole operands to the result; None is undefined, so zero and a report."""
        target = self.result(instruction)
        sources = [self.register(operand) for operand in operands]
        if undefined is not None:
            return self.set_defined(instruction, function, sources, undefined)
        match sources:
            case [a]:

                def unary(r: Registers) -> None:
                    r[target] = function(r[a])

                return unary
            case [a, b]:

                def binary(r: Registers) -> None:
                    r[target] = function(r[a], r[b])

                return binary

        def general(r: Registers) -> None:
            r[target] = function(*[r[source] for source in sources])

        return general

    def set_defined(
        self, instruction: ir.Instruction, function: Callable[..., Any], sources: list[int], undefined: str
    ) -> Operation:
        target = self.result(instruction)
        is_vector = isinstance(instruction.type, ir.VectorType)

        def operation(r: Registers) -> None:
            value = function(*[r[source] for source in sources])
            if value is None:
                value = 0
            elif is_vector and None in value:
                value = tuple([element or 0 for element in value])
            else:
                r[target] = value
                return
            r[0].host.report(undefined, r[0], instruction)
            r[target] = value

        return operation

    def cast(self, instruction: ir.Cast) -> Operation:
        source, target = instruction.value.type, instruction.type
        vectors = isinstance(source, ir.VectorType), isinstance(target, ir.VectorType)
        if instruction.operation == "bitcast" and any(vectors):
            encode, decode = self.program.codec(source).encode, self.program.codec(target).decode
            return self.set(instruction, lambda value: decode(encode(value), 0), instruction.operands)
        scalars = _element(source), _element(target)
        function = op.cast(instruction.operation, *scalars, self.program.address_bits(*scalars))
        return self.apply(instruction, function, op.UNDEFINABLE.get(instruction.operation))

    def select(self, instruction: ir.Select) -> Operation:
        if isinstance(instruction.condition.type, ir.VectorType):
            return self.apply(instruction, lambda condition, x, y: x if condition else y)
        return self.set(instruction, lambda condition, x, y: x if condition else y, instruction.operands)

    def alloca(self, instruction: ir.Alloca) -> Operation:
        target, size = self.result(instruction), self.layout.size(instruction.allocated)
        count = None if instruction.count is None else self.register(instruction.count)
        variable = self.program.module.variable(self.function, instruction.name or "")
        name = f"the variable {variable or instruction.result} of {self.function.name}"
        add = self.program.memory.add

        def operation(r: Registers) -> None:
            placed = add(name, bytearray(size if count is None else size * r[count]))
            r[0].frames[-1].objects.append(placed)
            r[target] = placed.address

        return operation

    def check_alignment(
        self, instruction: ir.Instruction, operation: Operation, pointer: int, align: int
    ) -> Operation:
        """``operation``, after a look at whether the address is as aligned as the compiler was told."""
        if align <= 1:
            return operation
        low, what = align - 1, f"an address that is no multiple of {align}"

        def checked(r: Registers) -> None:
            if r[pointer] & low:
                r[0].host.report(what, r[0], instruction)
            operation(r)

        return checked

    def load(self, instruction: ir.Load) -> Operation:
        target, pointer = self.result(instruction), self.register(instruction.pointer)
        form, locate = self.program.codec(instruction.type), self.program.memory.locate
        size, decode = form.size, form.decode

        def operation(r: Registers) -> None:
            data, at = locate(r[pointer], size, False)
            r[target] = decode(data, at)

        return self.check_alignment(instruction, operation, pointer, instruction.align)

    def store(self, instruction: ir.Store) -> Operation:
        source, pointer = self.register(instruction.value), self.register(instruction.pointer)
        form, locate = self.program.codec(instruction.value.type), self.program.memory.locate
        size, encode = form.size, form.encode

        def operation(r: Registers) -> None:
            data, at = locate(r[pointer], size, True)
            data[at : at + size] = encode(r[source])

        return self.check_alignment(instruction, operation, pointer, instruction.align)

    def address(self, instruction: ir.GetElementPtr) -> Operation:
        terms = self.program.address_terms(instruction.source, instruction.indices)
        address = self.program.address
        if isinstance(instruction.type, ir.VectorType):
            count = instruction.type.count
            are_vectors = [isinstance(operand.type, ir.VectorType) for operand in instruction.operands]

            def lanes(*operands: Any) -> tuple[int, ...]:
                columns = [o if v else (o,) * count for o, v in zip(operands, are_vectors, strict=True)]
                return tuple(address(lane[0], terms, lane[1:]) for lane in zip(*columns, strict=True))

            return self.set(instruction, lanes, instruction.operands)
        offset, variable = 0, []
        for term, index in zip(terms, instruction.indices, strict=True):
            if isinstance(index, ir.IntConstant):
                offset += address(0, [term], [index.unsigned])
            else:
                variable.append((self.register(index), term))
        target, pointer = self.result(instruction), self.register(instruction.pointer)
        if not variable:

            def constant(r: Registers) -> None:
                r[target] = (r[pointer] + offset) & _ADDRESS_MASK

            return constant
        registers = [register for register, _ in variable]
        varying = [term for _, term in variable]

        def operation(r: Registers) -> None:
            r[target] = address(r[pointer] + offset, varying, [r[register] for register in registers])

        return operation

    def vector(self, instruction: ir.ExtractElement | ir.InsertElement | ir.ShuffleVector) -> Operation:
        match instruction:
            case ir.ShuffleVector(mask=mask, type=kind):
                lanes = [0 if lane is None else lane for lane in mask]
                return self.set(
                    instruction, lambda x, y: tuple([(x + y)[lane] for lane in lanes]), instruction.operands
                )
            case ir.ExtractElement():
                return self.set(
                    instruction,
                    lambda vector, index: vector[index] if index < len(vector) else None,
                    instruction.operands,
                    "an index beyond a vector's end",
                )
            case ir.InsertElement(type=kind):
                beyond = (None,) * self.count(kind)
                return self.set(
                    instruction,
                    lambda vector, element, index: (
                        (*vector[:index], element, *vector[index + 1 :]) if index < len(vector) else beyond
                    ),
                    instruction.operands,
                    "an index beyond a vector's end",
                )

    @staticmethod
    def count(kind: ir.Type) -> int:
        assert isinstance(kind, ir.VectorType)
        return kind.count

    def aggregate(self, instruction: ir.ExtractValue | ir.InsertValue) -> Operation:
        indices = instruction.indices
        if isinstance(instruction, ir.ExtractValue):
            return self.set(
                instruction,
                lambda value: functools.reduce(operator.getitem, indices, value),
                instruction.operands,
            )
        return self.set(
            instruction, lambda value, element: _inserted(value, element, indices), instruction.operands
        )

    def atomic(self, instruction: ir.AtomicRMW | ir.CompareExchange) -> Operation:
        kind = instruction.operands[1].type
        form, locate = self.program.codec(kind), self.program.memory.locate
        size, decode, encode = form.size, form.decode, form.encode
        target, pointer = self.result(instruction), self.register(instruction.pointer)
        if isinstance(instruction, ir.AtomicRMW):
            function = op.atomic(instruction.operation, kind, self.program.address_bits(kind))
            operand = self.register(instruction.value)

            def modify(r: Registers) -> None:
                data, at = locate(r[pointer], size, True)
                old = decode(data, at)
                data[at : at + size] = encode(function(old, r[operand]))
                r[target] = old

            return self.check_alignment(instruction, modify, pointer, instruction.align)
        expected, replacement = self.register(instruction.expected), self.register(instruction.replacement)

        def exchange(r: Registers) -> None:
            data, at = locate(r[pointer], size, True)
            old = decode(data, at)
            same = old == r[expected]
            if same:
                data[at : at + size] = encode(r[replacement])
            r[target] = old, int(same)

        return self.check_alignment(instruction, exchange, pointer, instruction.align)

    # calls

    def call(self, instruction: ir.Call) -> Operation:
        arguments = [argument.value for argument in instruction.arguments]
        if not isinstance(instruction.callee, ir.Global):
            return self.call_address(instruction, arguments)
        name = instruction.callee.name
        if name.startswith("llvm."):
            return self.intrinsic(instruction, name.removeprefix("llvm."), arguments)
        registers, result = [self.register(a) for a in arguments], self.result(instruction)
        action: Invoke | Meet
        if name == LANE:

            def lane(r: Registers) -> None:
                r[result] = r[0].lane

            return lane
        if name == STORAGE:
            identity, size = registers

            def variable(r: Registers) -> None:
                r[result] = r[0].shared.variable(r[identity], r[size])

            return variable
        if (found := primitive(name)) is not None:
            action = Meet(found, registers, result, instruction)
        elif (callee := self.program.module.functions.get(name)) is not None and not callee.is_declaration:
            action = Invoke(self.program.function, name, registers, result)
        else:
            raise self.unmodelled(f"a call of {name}, which the program does not define", instruction)
        return lambda r: action

    def call_address(self, instruction: ir.Call, arguments: list[ir.Value]) -> Operation:
        registers, result = [self.register(a) for a in arguments], self.result(instruction)
        pointer, program = self.register(instruction.callee), self.program
        return lambda r: Invoke(program.function, program.function_at(r[pointer]), registers, result)

    def intrinsic(self, instruction: ir.Call, name: str, arguments: list[ir.Value]) -> Operation:
        if any(name == known or name.startswith(known + ".") for known in NOTHING):
            return _nothing
        registers = [self.register(a) for a in arguments]
        base = name.split(".")[0]
        read, write = self.program.memory.read, self.program.memory.write
        match base:
            case "memcpy" | "memmove":
                target, source, size, *_ = registers

                def copy(r: Registers) -> None:
                    if r[size]:
                        write(r[target], read(r[source], r[size]))

                return copy
            case "memset":
                target, byte, size, *_ = registers

                def fill(r: Registers) -> None:
                    if r[size]:
                        write(r[target], bytes([r[byte]]) * r[size])

                return fill
            case "assume":
                condition = registers[0]

                def assume(r: Registers) -> None:
                    if not r[condition]:
                        r[0].host.report("an assumption that does not hold", r[0], instruction)

                return assume
            case "trap" | "debugtrap" | "ubsantrap":
                return functools.partial(_trap, "a trap")
        found = compute(name, [a.type for a in arguments], instruction.type)
        if found is None:
            raise self.unmodelled(f"the intrinsic llvm.{name}", instruction)
        function, undefined = found
        return self.set(instruction, function, arguments, undefined)

    # terminators

    def terminator(self, instruction: ir.Terminator, block: ir.Block) -> Operation:
        match instruction:
            case ir.Return(value=value):
                leave = Leave(None if value is None else self.register(value))
                return lambda r: leave
            case ir.Branch(target=label):
                edge = self.edge(block, label)
                return lambda r: edge
            case ir.ConditionalBranch(condition=condition):
                then, otherwise = self.edge(block, instruction.then), self.edge(block, instruction.otherwise)
                test = self.register(condition)
                return lambda r: then if r[test] else otherwise
            case ir.Switch(value=value, cases=cases):
                default = self.edge(block, instruction.default)
                targets = {case.unsigned: self.edge(block, label) for case, label in cases}
                selector = self.register(value)
                return lambda r: targets.get(r[selector], default)
            case ir.Unreachable():
                return functools.partial(_trap, "code that must not be reached")
        raise self.unmodelled(f"the instruction `{instruction}`", instruction)

    def edge(self, source: ir.Block, label: str) -> Edge:
        moves = []
        for phi in self.function.block[label].phis:
            value = next(value for value, origin in phi.incoming if origin == source.label)
            moves.append((self.register(phi.result), self.register(value)))
        loop = None if self.flow is None else self.flow.innermost(label)
        turns = enters = None
        if loop is not None and loop.header == label:
            if source.label in loop.latches:
                turns = self.loops[loop]
            else:
                enters = self.loops[loop]
        return Edge(self.blocks[label], [d for d, _ in moves], [s for _, s in moves], turns, enters)


def _element(kind: ir.Type) -> ir.Type:
    return kind.element if isinstance(kind, ir.VectorType) else kind


def _nothing(r: Registers) -> None:
    pass


def _trap(what: str, r: Registers) -> None:
    raise TrapError(what)


def _inserted(value: tuple[Any, ...], element: Any, indices: tuple[int, ...]) -> tuple[Any, ...]:
    first, *rest = indices
    if rest:
        element = _inserted(value[first], element, tuple(rest))
    return (*value[:first], element, *value[first + 1 :])
