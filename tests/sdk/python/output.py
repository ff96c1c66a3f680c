"""Much output: all of it arrives, in order, on both streams."""

import hashlib

from common import sandbox

MIB = 1 << 20

with sandbox() as made:
    make = "seq 1000000000 | head -c {} | tee /tmp/{} ; sha256sum < /tmp/{} > /tmp/{}.sum"
    out = make.format(3 * MIB, "out", "out", "out")
    err = make.format(1 * MIB, "err", "err", "err")
    result = made.commands.run(f"{out}; ({err}) >&2")
    for name, text, size in (("out", result.stdout, 3 * MIB), ("err", result.stderr, MIB)):
        assert len(text) == size, f"{name}: {len(text)}"
        wanted = made.files.read(f"/tmp/{name}.sum").split()[0]
        assert hashlib.sha256(text.encode()).hexdigest() == wanted, name
