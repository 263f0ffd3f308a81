"""How deep a program's calls may take the stack: read from the object file, so the same number on every kernel.

The verifier adds up the frames of the deepest chain of calls, each rounded up to 32 bytes (Linux 6.1; newer ones
round less), and refuses more than 512.
"""

import struct
from dataclasses import dataclass, field
from functools import cache
from typing import Final

FRAME_ROUND_BYTES: Final = 32
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_RELOCATION: Final = struct.Struct("<QQ")
_INSTRUCTION: Final = struct.Struct("<BBhi")
_SYMBOLS, _RELOCATIONS = 2, 9
_FUNCTION: Final = 2
_FRAME_POINTER: Final = 10
_CALL, _PSEUDO_CALL = 0x85, 1
_MOVE, _ADD, _LOAD_LONG = 0xBF, 0x07, 0x18
_LOADS, _STORES = (0x01,), (0x02, 0x03)
"""Instruction classes; ALU is 0x04 and 0x07."""


@dataclass
class _Function:
    name: str
    frame_bytes: int = 0
    calls: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    link: int
    info: int
    data: bytes


def deepest_stack(data: bytes, program: str) -> int:
    """Give the bytes of stack that the deepest chain of calls from `program` takes."""
    functions = _read_functions(_read_sections(data))
    start = next(place for place, one in functions.items() if one.name == program)

    @cache
    def depth(place: tuple[int, int]) -> int:
        one = functions[place]
        frame = -(-max(one.frame_bytes, 1) // FRAME_ROUND_BYTES) * FRAME_ROUND_BYTES
        return frame + max((depth(called) for called in one.calls), default=0)

    return depth(start)


def _read_sections(data: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    heads = [_SECTION.unpack_from(data, table + index * size) for index in range(count)]
    texts = data[heads[names][4] :]
    return [
        _Section(
            name=_text(texts, head[0]),
            kind=head[1],
            link=head[6],
            info=head[7],
            data=data[head[4] : head[4] + head[5]],
        )
        for head in heads
    ]


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _read_functions(sections: list[_Section]) -> dict[tuple[int, int], _Function]:
    """By (section, first instruction)."""
    symbols = next(one for one in sections if one.kind == _SYMBOLS)
    entries = list(_SYMBOL.iter_unpack(symbols.data))
    names = sections[symbols.link].data
    functions = {}
    for name, info, _, section, value, size in entries:
        if info & 0xF == _FUNCTION:
            relocations = _calls_elsewhere(sections, section, entries)
            functions[section, value // 8] = _read_function(
                _Function(_text(names, name)),
                sections[section].data[value : value + size],
                (section, value // 8),
                relocations,
            )
    return functions


def _calls_elsewhere(
    sections: list[_Section], section: int, symbols: list[tuple[int, ...]]
) -> dict[int, tuple[int, int]]:
    """By instruction: section and offset (in instructions) of the symbol that its relocation names."""
    found = {}
    for one in sections:
        if one.kind == _RELOCATIONS and one.info == section:
            for offset, info in _RELOCATION.iter_unpack(one.data):
                symbol = symbols[info >> 32]
                found[offset // 8] = symbol[3], symbol[4] // 8
    return found


def _read_function(
    one: _Function,
    code: bytes,
    place: tuple[int, int],
    relocations: dict[int, tuple[int, int]],
) -> _Function:
    section, first = place
    on_stack = {_FRAME_POINTER: 0}
    """Registers that point into the frame, and how far below its top."""
    for index, (op, registers, offset, number) in enumerate(_INSTRUCTION.iter_unpack(code)):
        target, source = registers & 0xF, registers >> 4
        kind = op & 0x07
        if op == _CALL and source == _PSEUDO_CALL:
            base = relocations.get(first + index, (section, first + index + 1))
            step = number + 1 if first + index in relocations else number
            one.calls.add((base[0], base[1] + step))
        touched = source if kind in _LOADS else target if kind in _STORES else None
        if touched in on_stack:
            one.frame_bytes = max(one.frame_bytes, -(on_stack[touched] + offset))
        if op == _MOVE and source in on_stack:
            on_stack[target] = on_stack[source]
        elif op == _ADD and target in on_stack and number < 0:
            on_stack[target] += number
            one.frame_bytes = max(one.frame_bytes, -on_stack[target])
        elif kind in (*_LOADS, 0x00, 0x04, 0x07) and target != _FRAME_POINTER:
            on_stack.pop(target, None)
    return one
