"""The system-call filter of the bubblewrap box, as a classic BPF program for `bwrap --seccomp`.

It refuses what no exercise needs and what would widen the box: nested namespaces (an own tmpfs has no bound), sockets
other than IP, Unix and netlink (a virtual machine's vsock reaches the host past the network namespace), kernel keys,
tracing, BPF, io_uring. See seccomp(2) and linux/filter.h.
"""

from __future__ import annotations

import platform
import struct

# name: (x86_64, aarch64); from the kernel's syscall tables
_REFUSED = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265),
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_ARCH = (0xC000003E, 0xC00000B7)
_MACHINES = ("x86_64", "aarch64")
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink (getifaddrs)

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16  # offsets in struct seccomp_data


def program() -> bytes:
    """The filter for this machine; empty where its system-call numbers are not known."""
    if platform.machine() not in _MACHINES:
        return b""
    i = _MACHINES.index(platform.machine())
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCH[i]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if i == 0:  # the x32 calls are the same ones under other numbers
        code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE | _ENOSYS)]
    for numbers in _REFUSED.values():
        code += [(_EQUAL, 0, 1, numbers[i]), (_RETURN, 0, 0, _REFUSE | _EPERM)]
    # clone3 hides its flags behind a pointer; on ENOSYS libc falls back to clone
    code += [(_EQUAL, 0, 1, _CLONE3[i]), (_RETURN, 0, 0, _REFUSE | _ENOSYS)]
    code += [(_EQUAL, 0, 4, _CLONE[i]), (_LOAD, 0, 0, _ARGUMENT_0), (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
             (_RETURN, 0, 0, _REFUSE | _EPERM), (_RETURN, 0, 0, _ALLOW)]  # fmt: skip
    code += [(_EQUAL, 0, len(_FAMILIES) + 2, _SOCKET[i]), (_LOAD, 0, 0, _ARGUMENT_0)]
    code += [(_EQUAL, len(_FAMILIES) - k, 0, family) for k, family in enumerate(_FAMILIES)]
    code += [(_RETURN, 0, 0, _REFUSE | _EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in code)
