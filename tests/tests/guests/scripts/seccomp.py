"""Forbids the making of directories with a seccomp filter, and tries it before and after."""
import ctypes
import os
import struct
import tempfile

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000
MKDIR, MKDIRAT, EDQUOT = 83, 258, 122

instructions = [
    (LOAD, 0, 0, 0),  # the number of the system call
    (JUMP_IF_EQUAL, 2, 0, MKDIR),
    (JUMP_IF_EQUAL, 1, 0, MKDIRAT),
    (RETURN, 0, 0, ALLOW),
    (RETURN, 0, 0, FAIL_WITH | EDQUOT),
]
code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
buffer = ctypes.create_string_buffer(code)
program = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))

where = tempfile.mkdtemp()
os.mkdir(where + "/before")
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
assert libc.prctl(PR_SET_SECCOMP, MODE_FILTER, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
try:
    os.mkdir(where + "/after")
except OSError as error:
    print("refused", error.errno)
print(*os.listdir(where))
