"""Standard input of commands: sent piece by piece, and closed."""

import hashlib

from common import sandbox

with sandbox() as made:
    commands = made.commands

    handle = commands.run("read a; read b; echo $b $a", background=True, stdin=True)
    commands.send_stdin(handle.pid, "one\ntw")
    commands.send_stdin(handle.pid, b"o\n")
    assert handle.wait().stdout == "two one\n"

    handle = commands.run("sha256sum", background=True, stdin=True)
    for _ in range(4):
        commands.send_stdin(handle.pid, "x" * 100_000)
    commands.close_stdin(handle.pid)
    digest = handle.wait().stdout.split()[0]
    assert digest == hashlib.sha256(b"x" * 400_000).hexdigest()

    if hasattr(commands, "stream_input"):
        handle = commands.run("head -c 300000 | sha256sum", background=True, stdin=True)
        commands.stream_input(handle.pid, ("y" * 100_000 for _ in range(3)))
        digest = handle.wait().stdout.split()[0]
        assert digest == hashlib.sha256(b"y" * 300_000).hexdigest()
