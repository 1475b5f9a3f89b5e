"""The seccomp filter of the sandbox: the system calls that a program may not make.

It refuses what namespaces and limits do not cover: capabilities in new namespaces, memory that
belongs to no process, address families without network namespaces (such as vsock), and parts of the
kernel with known vulnerabilities. Ordinary programs are not affected.
"""

import errno
import platform
import struct

# name: number on x86_64, on aarch64 (None: no such call there)
_REFUSED: dict[str, tuple[int, int | None]] = {
    # another file system
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "open_tree_attr": (467, 467),
    # other namespaces (clone and clone3: below)
    "unshare": (272, 97), "setns": (308, 268),
    # other processes' memory and files
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # memory that no process's limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # parts of the kernel that most ways out went through
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "vmsplice": (278, 75), "personality": (135, 92), "modify_ldt": (154, None),
    # the machine itself
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "syslog": (103, 116), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "iopl": (172, None), "ioperm": (173, None), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
}  # fmt: skip
_SOCKET, _CLONE, _CLONE3 = (41, 198), (56, 220), (435, 435)
_AF_UNIX = 1
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. (NEWTIME is unshare's only.)
_NEW_NAMESPACES = 0x7E020000

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH_*
_X32 = 0x40000000  # the same calls under other numbers, on x86_64

# struct seccomp_data
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
# BPF: load a word; jump if equal, if greater or equal, if a bit is set; return
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def supported(machine: str | None = None) -> bool:
    """Whether the numbers of this architecture (`platform.machine()`) are known."""
    return (machine or platform.machine()) in _ARCHITECTURES


def build_filter(machine: str | None = None) -> bytes:
    """The filter's instructions, for `kernel.filter_system_calls`."""
    column, architecture = _ARCHITECTURES[machine or platform.machine()]
    instructions = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, architecture, skip_if_true=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32, skip_if_false=1),
        _instruction(_RETURN, _KILL),
    ]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            instructions += _refuse(number, errno.EPERM)
    # Its flags are in memory, where a filter cannot look. C libraries fall back to clone.
    instructions += _refuse(_CLONE3[column], errno.ENOSYS)
    instructions += [
        _instruction(_EQUAL, _CLONE[column], skip_if_false=4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_ANY_BIT, _NEW_NAMESPACES, skip_if_false=1),
        _instruction(_RETURN, _ERROR | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_EQUAL, _SOCKET[column], skip_if_false=3),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_EQUAL, _AF_UNIX, skip_if_true=1),
        _instruction(_RETURN, _ERROR | errno.EAFNOSUPPORT),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(instructions)


def _refuse(number: int, error: int) -> list[bytes]:
    return [
        _instruction(_EQUAL, number, skip_if_false=1),
        _instruction(_RETURN, _ERROR | error),
    ]


def _instruction(code: int, value: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if_true, skip_if_false, value)
