"""A stack machine for the few opcodes of protocols 2 to 5 that a list of tensors is made of. It runs no code.

`parse` takes bytes and returns plain values: None, bool, int, str, tuple, list, dict, memoryview (bytes, not copied)
and `Name`s. A `Name` is two strings that stood in an allow-list; nothing is imported or looked up. What calling one
means is told by the caller's `reduce`, which answers with an opaque value of its own. Any other opcode, name or use is
a `RemoteProtocolError`.

It takes linear time: an opcode costs what it is long, and a `Budget` bounds how many there may be, so that neither a
chain of cheap opcodes nor a shared object used over and over can keep us busy. There is no recursion, and no length is
believed that does not fit what was received. PROTOCOL.md section 4.1 lists what servers and clients send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Final

import attrs

from lmcache_sdk.errors import RemoteProtocolError

Reduce = Callable[["Name", tuple[object, ...]], object]
PersistentLoad = Callable[[object], object]

LOWEST_PROTOCOL: Final = 2
HIGHEST_PROTOCOL: Final = 5
_MAX_NAME: Final = 64
_MAX_INT_NBYTES: Final = 16
"""The longest integer that occurs is the magic number of a storage stream: 10 bytes."""
_MARK: Final = object()


@attrs.frozen
class Name:
    """A global's name, from the allow-list."""

    module: str
    attribute: str


@attrs.define(eq=False, repr=False)
class Budget:
    """How many opcodes, and how many bytes of copies, one payload may still cost."""

    opcodes: int
    copied_nbytes: int

    def spend_opcode(self) -> None:
        """Counts one opcode."""
        self.opcodes -= 1
        if self.opcodes < 0:
            raise malformed("more opcodes than its tensors need")

    def spend_copy(self, nbytes: int) -> None:
        """Counts bytes that have to be copied."""
        self.copied_nbytes -= nbytes
        if self.copied_nbytes < 0:
            raise malformed("the same bytes are used more than once")


def malformed(problem: str) -> RemoteProtocolError:
    """The one error of this parser."""
    return RemoteProtocolError(f"payload: not a list of tensors: {problem}", path="payload")


def parse(
    data: memoryview,
    start: int,
    *,
    names: AbstractSet[Name],
    reduce: Reduce,
    budget: Budget,
    load: PersistentLoad | None = None,
) -> tuple[object, int]:
    """Runs one stream.

    Args:
        data: bytes, read-only or not; results may be views of them.
        start: where the stream begins.
        names: the globals that may be named.
        reduce: what calling a name means.
        budget: shared by all streams of one payload.
        load: what a persistent id means; None when there may be none.

    Returns:
        The value, and where the stream ended.
    """
    machine = _Machine(data, start, names, reduce, load)
    if machine.number(1) != _PROTOCOL or not LOWEST_PROTOCOL <= machine.number(1) <= HIGHEST_PROTOCOL:
        raise malformed(f"no protocol {LOWEST_PROTOCOL} to {HIGHEST_PROTOCOL} at byte {start}")
    while True:
        budget.spend_opcode()
        code = machine.take(1)[0]
        if code == _STOP:
            return machine.finish(), machine.position
        run = _OPCODES.get(code)
        if run is None:
            raise malformed(f"opcode {code:#04x} at byte {machine.position - 1}")
        run(machine)


class _Machine:
    """The stack, the memo and the position of one stream."""

    __slots__ = ("_data", "_load", "_memo", "_names", "_reduce", "position", "stack")

    def __init__(
        self, data: memoryview, start: int, names: AbstractSet[Name], reduce: Reduce, load: PersistentLoad | None
    ) -> None:
        self._data, self._names, self._reduce, self._load = data, names, reduce, load
        self.position = start
        self.stack: list[object] = []
        # a list: writers number their memo without gaps, and no peer gets to choose the keys of a dict
        self._memo: list[object] = []

    def take(self, nbytes: int) -> memoryview:
        end = self.position + nbytes
        if end > len(self._data):
            raise malformed(f"it ends at byte {len(self._data)}, {end - len(self._data)} too early")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def pop(self) -> object:
        if not self.stack or self.stack[-1] is _MARK:
            raise malformed(f"nothing to take at byte {self.position}")
        return self.stack.pop()

    def drop(self) -> None:
        self.pop()

    def pop_to_mark(self) -> list[object]:
        items: list[object] = []
        while self.stack:
            item = self.stack.pop()
            if item is _MARK:
                items.reverse()
                return items
            items.append(item)
        raise malformed(f"no mark before byte {self.position}")

    def finish(self) -> object:
        value = self.pop()
        if self.stack:
            raise malformed(f"{len(self.stack)} values are left over")
        return value

    # ---- values ----

    def push_tuple(self, length: int) -> None:
        items = [self.pop() for _ in range(length)]
        self.stack.append(tuple(reversed(items)))

    def push_int(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def push_long(self) -> None:
        nbytes = self.number(1)
        if nbytes > _MAX_INT_NBYTES:
            raise malformed(f"an integer of {nbytes} bytes")
        self.stack.append(int.from_bytes(self.take(nbytes), "little", signed=True))

    def push_text(self, nbytes: int) -> None:
        try:
            self.stack.append(str(self.take(self.number(nbytes)), "utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise malformed(f"text that is not UTF-8 before byte {self.position}") from error

    def push_bytes(self, nbytes: int) -> None:
        self.stack.append(self.take(self.number(nbytes)))

    # ---- containers: they hold what was pushed and nothing looks into them before the end ----

    def append(self) -> None:
        item = self.pop()
        self._list_below().append(item)

    def extend(self) -> None:
        items = self.pop_to_mark()
        self._list_below().extend(items)

    def _list_below(self) -> list[object]:
        if self.stack and isinstance(self.stack[-1], list):
            return self.stack[-1]
        raise malformed(f"no list to append to at byte {self.position}")

    def update(self) -> None:
        items = self.pop_to_mark()
        target = self.stack[-1] if self.stack else None
        if not isinstance(target, dict) or len(items) % 2:
            raise malformed(f"no map to fill at byte {self.position}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):  # strings hash with a secret: nobody makes them collide
                raise malformed("a map key that is not text")
            target[key] = value

    # ---- names and calls ----

    def push_global(self) -> None:
        head = bytes(self._data[self.position : self.position + 2 * _MAX_NAME + 2])
        module, first, rest = head.partition(b"\n")
        attribute, second, _ = rest.partition(b"\n")
        if not first or not second:
            raise malformed(f"an unending name at byte {self.position}")
        self.take(len(module) + len(attribute) + 2)
        self._push_name(module.decode("latin-1"), attribute.decode("latin-1"))

    def push_stack_global(self) -> None:
        attribute, module = self.pop(), self.pop()
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise malformed("a name that is not text")
        self._push_name(module, attribute)

    def _push_name(self, module: str, attribute: str) -> None:
        name = Name(module[:_MAX_NAME], attribute[:_MAX_NAME])
        if name not in self._names:
            raise malformed(f"the name {name.module!r}, {name.attribute!r} is not allowed")
        self.stack.append(name)

    def reduce(self) -> None:
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, Name) or not isinstance(arguments, tuple):
            raise malformed(f"no call at byte {self.position}")
        self.stack.append(self._reduce(name, arguments))

    def load_persistent(self) -> None:
        if self._load is None:
            raise malformed("a persistent id")
        self.stack.append(self._load(self.pop()))

    # ---- memo ----

    def put(self, index: int) -> None:
        if not self.stack or self.stack[-1] is _MARK or index > len(self._memo):
            raise malformed(f"nothing to remember at byte {self.position}")
        self._memo[index : index + 1] = [self.stack[-1]]

    def memoize(self) -> None:
        self.put(len(self._memo))

    def get(self, index: int) -> None:
        if index >= len(self._memo):
            raise malformed(f"nothing remembered under {index}")
        self.stack.append(self._memo[index])

    def skip_frame(self) -> None:
        nbytes = self.number(8)
        if nbytes > len(self._data) - self.position:
            raise malformed("a frame longer than the payload")


def _push(value: object) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


_PROTOCOL: Final = 0x80
_STOP: Final = ord(".")
_OPCODES: Final[Mapping[int, Callable[[_Machine], None]]] = MappingProxyType(
    {
        ord("("): _push(_MARK),
        ord("0"): _Machine.drop,
        ord("N"): _push(None),
        0x88: _push(True),
        0x89: _push(False),
        ord("]"): lambda machine: machine.stack.append([]),
        ord("}"): lambda machine: machine.stack.append({}),
        ord(")"): _push(()),
        ord("t"): lambda machine: machine.stack.append(tuple(machine.pop_to_mark())),
        0x85: lambda machine: machine.push_tuple(1),
        0x86: lambda machine: machine.push_tuple(2),
        0x87: lambda machine: machine.push_tuple(3),
        ord("a"): _Machine.append,
        ord("e"): _Machine.extend,
        ord("u"): _Machine.update,
        ord("J"): _Machine.push_int,
        ord("K"): lambda machine: machine.stack.append(machine.number(1)),
        ord("M"): lambda machine: machine.stack.append(machine.number(2)),
        0x8A: _Machine.push_long,
        0x8C: lambda machine: machine.push_text(1),
        ord("X"): lambda machine: machine.push_text(4),
        0x8D: lambda machine: machine.push_text(8),
        ord("C"): lambda machine: machine.push_bytes(1),
        ord("B"): lambda machine: machine.push_bytes(4),
        0x8E: lambda machine: machine.push_bytes(8),
        0x96: lambda machine: machine.push_bytes(8),  # a bytearray
        ord("c"): _Machine.push_global,
        0x93: _Machine.push_stack_global,
        ord("R"): _Machine.reduce,
        ord("Q"): _Machine.load_persistent,
        ord("q"): lambda machine: machine.put(machine.number(1)),
        ord("r"): lambda machine: machine.put(machine.number(4)),
        0x94: _Machine.memoize,
        ord("h"): lambda machine: machine.get(machine.number(1)),
        ord("j"): lambda machine: machine.get(machine.number(4)),
        0x95: _Machine.skip_frame,
    }
)
