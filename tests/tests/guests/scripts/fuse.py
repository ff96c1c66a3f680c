"""Serves a file system of one file through /dev/fuse, and reads the file."""
import ctypes
import errno
import os
import struct
import tempfile
import threading

LOOKUP, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT = 1, 3, 14, 15, 18, 25, 26
ROOT, FILE = 1, 2
CONTENT = b"served from user space\n"


def attributes(node):
    kind, size = (0o040755, 0) if node == ROOT else (0o100644, len(CONTENT))
    #                  inode size blocks times      ns       mode  links ids rdev blksize flags
    return struct.pack("=6Q3I7I", node, size, 1, 0, 0, 0, 0, 0, 0, kind, 1, 0, 0, 0, 512, 0)


def answer(operation, node, body):
    """The answer to a request: a number is an error."""
    if operation == INIT:
        return struct.pack("=4I2H2I", 7, 31, 4096, 0, 1, 1, 4096, 1) + bytes(32)
    if operation == GETATTR:
        return struct.pack("=QII", 0, 0, 0) + attributes(node)
    if operation == LOOKUP:
        if body.rstrip(b"\0") != b"hello":
            return errno.ENOENT
        return struct.pack("=4Q2I", FILE, 0, 0, 0, 0, 0) + attributes(FILE)
    if operation == OPEN:
        return struct.pack("=QII", 0, 0, 0)
    if operation == READ:
        _, offset, size = struct.unpack_from("=QQI", body)
        return CONTENT[offset : offset + size]
    if operation in (RELEASE, FLUSH):
        return b""
    return errno.ENOSYS


def serve(device):
    while True:
        try:
            request = os.read(device, 1 << 20)
        except OSError as error:
            # The file system was unmounted.
            assert error.errno == errno.ENODEV, error
            return
        _, operation, unique, node = struct.unpack_from("=IIQQ", request)
        result = answer(operation, node, request[40:])
        code, body = (-result, b"") if isinstance(result, int) else (0, result)
        os.write(device, struct.pack("=IiQ", 16 + len(body), code, unique) + body)


libc = ctypes.CDLL(None, use_errno=True)
device = os.open("/dev/fuse", os.O_RDWR)
where = tempfile.mkdtemp().encode()
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
assert libc.mount(b"one", where, b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
server = threading.Thread(target=serve, args=(device,))
server.start()
with open(where + b"/hello", "rb") as file:
    print(file.read().decode(), end="")
assert libc.umount2(where, 0) == 0, os.strerror(ctypes.get_errno())
server.join()
