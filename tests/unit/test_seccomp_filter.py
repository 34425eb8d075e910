"""The filter of system calls, interpreted instruction by instruction for both architectures: no
kernel needed.
"""

from __future__ import annotations

import errno
import struct

import pytest

from shared.tasks.sandbox import confinement
from shared.tasks.sandbox.confinement import NUMBERS

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
FORBIDDEN = {
    "x86_64": {"socket": 41, "connect": 42, "execve": 59, "ptrace": 101, "tgkill": 234, "unshare": 272, "process_vm_readv": 310,
               "io_uring_setup": 425, "pidfd_open": 434, "openat2": 437},
    "aarch64": {"socket": 198, "connect": 203, "execve": 221, "ptrace": 117, "tgkill": 131, "unshare": 97, "process_vm_readv": 270,
                "io_uring_setup": 425, "pidfd_open": 434, "openat2": 437},
}  # fmt: skip


def verdict(program: bytes, architecture: int, number: int, first_argument: int = 0) -> int:
    """Return what the kernel's interpreter of classic BPF returns for `struct seccomp_data`."""
    instructions = list(struct.iter_unpack("HBBI", program))
    called = struct.pack("IIQ6Q", number, architecture, 0, first_argument, 0, 0, 0, 0, 0)
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = instructions[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("I", called, value)
        elif code == 0x06:
            return int(value)
        elif code in {0x15, 0x35}:
            met = accumulator == value if code == 0x15 else accumulator >= value
            at += if_true if met else if_false
        else:
            raise AssertionError(f"instruction {code:#x} is not used")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_scorer_computes_and_imports_and_does_nothing_else(machine: str) -> None:
    program, architecture, numbers = confinement.filter_program(machine, forking=False), ARCHITECTURES[machine], NUMBERS[machine]
    for name in ("read", "write", "openat", "mmap", "brk", "futex", "exit_group", "setitimer", "rt_sigreturn"):
        assert verdict(program, architecture, numbers[name]) == ALLOW, name
    for name in confinement.FORKING & numbers.keys():
        assert verdict(program, architecture, numbers[name]) == REFUSE, name
    for name, number in FORBIDDEN[machine].items():
        assert verdict(program, architecture, number) == REFUSE, name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_parent_of_foreign_scorers_may_also_fork_wait_and_kill_and_no_more(machine: str) -> None:
    program, architecture, numbers = confinement.filter_program(machine, forking=True), ARCHITECTURES[machine], NUMBERS[machine]
    for name in confinement.FORKING & numbers.keys():
        assert verdict(program, architecture, numbers[name]) == ALLOW, name
    for name, number in FORBIDDEN[machine].items():
        assert verdict(program, architecture, number) == REFUSE, name


def test_another_architectures_calls_kill_x32_is_refused_and_limits_are_ones_own() -> None:
    program, numbers = confinement.filter_program("x86_64", forking=False), NUMBERS["x86_64"]
    assert verdict(program, 0x40000003, numbers["read"]) == KILL, "32-bit calls"
    assert verdict(program, ARCHITECTURES["x86_64"], 0x40000000 | numbers["read"]) == REFUSE, "x32"
    assert verdict(program, ARCHITECTURES["x86_64"], numbers["prlimit64"]) == ALLOW
    assert verdict(program, ARCHITECTURES["x86_64"], numbers["prlimit64"], first_argument=1) == REFUSE


def test_an_architecture_without_numbers_is_said_and_not_guessed() -> None:
    with pytest.raises(confinement.SeccompUnavailable, match="riscv64"):
        confinement.filter_program("riscv64", forking=False)
