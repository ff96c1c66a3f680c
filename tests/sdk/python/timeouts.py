"""Time limits of commands: the command is killed, and the client told so."""

import time

from common import raises, sandbox
from e2b import TimeoutException

with sandbox() as made:
    begun = time.monotonic()
    with raises(TimeoutException):
        made.commands.run("echo $$ > /tmp/pid; exec sleep 1000", timeout=2)
    assert time.monotonic() - begun < 30, "the limit is not kept"
    # The guest ends it at the same moment as the client gives up.
    gone = "for i in $(seq 100); do kill -0 $(cat /tmp/pid) 2>&- || exit 0; sleep 0.1; done; exit 1"
    made.commands.run(gone)

    assert made.commands.run("sleep 1; echo within", timeout=60).stdout == "within\n"
    handle = made.commands.run("sleep 2; echo no limit", background=True, timeout=0)
    assert handle.wait().stdout == "no limit\n"
