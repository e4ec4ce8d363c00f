"""The seccomp filter of media workers: system calls by a list, or those that are denied.

A filter is a program of classic BPF (`seccomp(2)`). It ends with the first rule for a call. A call of another
architecture ends the process. A denied call returns EPERM. One that is missing returns ENOSYS, so that a library that
can do without it goes on.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from . import system_calls
from .system_calls import ArgumentRule, Numbers

LIBC = ctypes.CDLL(None, use_errno=True)

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2

# operations
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_ANY_BIT = 0x45
_JUMP_GREATER_EQUAL = 0x35
_RETURN = 0x06
# what a filter returns
_ALLOW = 0x7FFF0000
_DENY = 0x00050000 | errno.EPERM
_MISSING = 0x00050000 | errno.ENOSYS
_KILL = 0x80000000
# offsets in `struct seccomp_data`
_NUMBER_OFFSET = 0
_ARCHITECTURE_OFFSET = 4
_ARGUMENTS_OFFSET = 16
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_Instruction: TypeAlias = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, operand."""


def has_filter(machine: str) -> bool:
    return machine in ARCHITECTURES and sys.maxsize > 2**32


def has_list(machine: str) -> bool:
    """Whether `build_filter` can allow calls by a list: the numbers of other machines are not tested."""
    return machine == "x86_64" and has_filter(machine)


def build_filter(machine: str = platform.machine(), *, by_list: bool) -> bytes:
    """Return the filter for a machine; empty if it has none.

    Args:
        machine: as in `platform.machine`.
        by_list: whether calls that are not in the list are missing. Otherwise, they are allowed unless they are denied.
    """
    if not has_filter(machine):
        return b""
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in _instructions(machine, by_list))


def apply_filter(code: bytes) -> None:
    """Filter the system calls of this thread and of those that it starts, for the rest of their lives."""
    program = _Program(len(code) // 8, code)
    if LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # a kernel without seccomp filters
            raise OSError(number, "prctl(PR_SET_SECCOMP) failed")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _instructions(machine: str, by_list: bool) -> Iterator[_Instruction]:
    yield from (
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL),
    )
    for numbers, rule in _rules(by_list):
        number = numbers.on(machine)
        if number is not None:
            yield (_JUMP_EQUAL, 0, len(rule), number)
            yield from rule
    yield (_RETURN, 0, 0, _MISSING if by_list else _ALLOW)


def _rules(by_list: bool) -> Iterator[tuple[Numbers, Sequence[_Instruction]]]:
    # For each call, the instructions that end the filter.
    for numbers, index in system_calls.OPEN.values():
        yield numbers, _if_any_bit(index, system_calls.WRITE_FLAGS, _DENY, _ALLOW)
    yield system_calls.CLONE, _if_any_bit(0, system_calls.CLONE_THREAD, _ALLOW, _DENY)
    yield system_calls.MMAP, _if_all_bits(3, (system_calls.MAP_SHARED, system_calls.MAP_ANONYMOUS), _DENY, _ALLOW)
    for argument in system_calls.ARGUMENT_RULES.values():
        yield argument.numbers, _if_allowed(argument, by_list)
    for number in system_calls.ALLOWED.values() if by_list else ():
        yield Numbers(number, None), [(_RETURN, 0, 0, _ALLOW)]
    for result, calls in ((_MISSING, system_calls.MISSING), (_DENY, system_calls.DENIED)):
        for numbers in calls.values():
            yield numbers, [(_RETURN, 0, 0, result)]


def _if_allowed(rule: ArgumentRule, by_list: bool) -> Sequence[_Instruction]:
    if by_list or rule.denied is None:
        return _if_equal(rule.argument, rule.allowed, _ALLOW, _DENY)
    return _if_equal(rule.argument, rule.denied, _DENY, _ALLOW)


def _if_equal(index: int, values: Sequence[int], then: int, otherwise: int) -> Sequence[_Instruction]:
    comparisons = [step for value in values for step in ((_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, then))]
    return [_load_argument(index), *comparisons, (_RETURN, 0, 0, otherwise)]


def _if_any_bit(index: int, mask: int, then: int, otherwise: int) -> Sequence[_Instruction]:
    return [_load_argument(index), (_JUMP_ANY_BIT, 0, 1, mask), (_RETURN, 0, 0, then), (_RETURN, 0, 0, otherwise)]


def _if_all_bits(index: int, bits: Sequence[int], then: int, otherwise: int) -> Sequence[_Instruction]:
    tests = [step for bit in bits for step in ((_JUMP_ANY_BIT, 1, 0, bit), (_RETURN, 0, 0, otherwise))]
    return [_load_argument(index), *tests, (_RETURN, 0, 0, then)]


def _load_argument(index: int) -> _Instruction:
    """Load the lower half of an argument: the kernel ignores the upper half of those that are compared."""
    return (_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * index)
