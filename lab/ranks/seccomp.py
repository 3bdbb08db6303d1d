"""System-call filters as classic BPF programs: one for the grader's sandbox (`bwrap --seccomp`), one for each rank.

Both refuse calls that no exercise needs and that would weaken the sandbox: kernel keys, tracing, BPF, io_uring, and
sockets other than IP, Unix and netlink. (The vsock of a virtual machine would reach the host past the network
namespace.) The filter of a rank also refuses new namespaces, because a new tmpfs has no size limit; locks and watches
on shared read-only files, because they carry messages; and memory that no process is charged for (memfd, System V
segments, buffers of Unix and netlink sockets). Unless kernels are compiled, it also refuses pipes and child processes,
because nobody counts their memory. See seccomp(2), linux/filter.h.
"""

import ctypes
import os
import platform
import struct

# name: (x86_64, aarch64); from the kernel's syscall tables
_REFUSED = {
    "setns": (308, 268), "pivot_root": (155, 41), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265),
}  # fmt: skip
_REFUSED_TO_RANKS = {
    "unshare": (272, 97), "mount": (165, 40), "umount2": (166, 39), "fsopen": (430, 430), "open_tree": (428, 428),
    "move_mount": (429, 429), "memfd_create": (319, 279), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "inotify_init": (253, 26), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262), "socketpair": (53, 199),
}  # fmt: skip
_FORK, _VFORK = 57, 58  # only x86_64 has them
_FLOCK, _FCNTL = (73, 32), (72, 25)
_LOCKS = (5, 6, 7, 36, 37, 38, 1024, 1026, 1031)  # F_GETLK, F_SETLK, F_SETLKW, …; leases; F_NOTIFY; F_SETPIPE_SZ
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_ARCH = (0xC000003E, 0xC00000B7)
_MACHINES = ("x86_64", "aarch64")
_THREAD = 0x10000  # CLONE_THREAD
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_PIPES = ((22, 293), (59,))  # pipe, pipe2
_UNIX, _NETLINK, _IP = 1, 16, (2, 10)  # netlink for getifaddrs

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24  # offsets in struct seccomp_data


def program(rank: bool = False, forks: bool = True) -> bytes:
    """Return the filter for a sandbox, or for a rank in one; b"" on a machine whose call numbers are unknown.

    forks: whether the rank may start processes.
    """
    if platform.machine() not in _MACHINES:
        return b""
    i = _MACHINES.index(platform.machine())
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCH[i]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if i == 0:  # x32 has the same calls under other numbers
        code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE | _ENOSYS)]
    for numbers in (_REFUSED | _REFUSED_TO_RANKS if rank else _REFUSED).values():
        code += [(_EQUAL, 0, 1, numbers[i]), (_RETURN, 0, 0, _REFUSE | _EPERM)]
    # a filter cannot read the flags of clone3, behind a pointer; on ENOSYS libc falls back to clone
    code += [(_EQUAL, 0, 1, _CLONE3[i]), (_RETURN, 0, 0, _REFUSE | _ENOSYS)]
    if rank:  # report success: honest programs lock only files that nobody else can reach
        code += [(_EQUAL, 0, 1, _FLOCK[i]), (_RETURN, 0, 0, _REFUSE)]
        code += _check_argument(_FCNTL[i], _ARGUMENT_1, [(_EQUAL, command) for command in _LOCKS], _REFUSE, _ALLOW)
        if forks:
            code += _check_argument(_CLONE[i], _ARGUMENT_0, [(_ANY_BIT, _NEW_NAMESPACES)], _REFUSE | _EPERM, _ALLOW)
        else:  # threads cannot get new namespaces, because a rank has no capabilities
            code += _check_argument(_CLONE[i], _ARGUMENT_0, [(_ANY_BIT, _THREAD)], _ALLOW, _REFUSE | _EPERM)
            for number in (*_PIPES[i], *((_FORK, _VFORK) if i == 0 else ())):
                code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | _EPERM)]
    families = [(_EQUAL, family) for family in (_IP if rank else (_UNIX, _NETLINK, *_IP))]
    code += _check_argument(_SOCKET[i], _ARGUMENT_0, families, _ALLOW, _REFUSE | _EAFNOSUPPORT)
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in code)


def _check_argument(call: int, offset: int, tests: list[tuple[int, int]], if_any: int, if_none: int) -> list[tuple]:
    """Return code that decides a call by one argument: `if_any` if any test holds, otherwise `if_none`."""
    count = len(tests)
    code = [(_EQUAL, 0, count + 3, call), (_LOAD, 0, 0, offset)]
    code += [(kind, count - k, 0, value) for k, (kind, value) in enumerate(tests)]
    return [*code, (_RETURN, 0, 0, if_none), (_RETURN, 0, 0, if_any)]


def install(program: bytes) -> None:
    """Apply a filter to this process and all its children. Raises OSError if the kernel refuses."""

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))

    libc = ctypes.CDLL(None, use_errno=True)
    fprog = Filter(len(program) // 8, program)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(fprog), 0, 0):  # NO_NEW_PRIVS, SECCOMP
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
