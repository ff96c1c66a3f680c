"""Pause and connect: files, processes and the ID stay, and the clock is right afterwards."""

import time

from common import Sandbox, raises, sandbox
from e2b import SandboxNotFoundException

with sandbox(metadata={"kept": "yes"}) as made:
    made.files.write("/tmp/note", "before")
    counter = made.commands.run(
        "n=0; while read line; do n=$((n+1)); echo $n $line; done", background=True, stdin=True
    )
    made.commands.send_stdin(counter.pid, "first\n")
    stdout = iter(counter)
    assert next(stdout)[0] == "1 first\n"
    counter.disconnect()

    for round in range(2):
        made.beta_pause()
        assert made.get_info().state.value == "paused"
        made.beta_pause()  # It is no error to ask again.
        paused = time.time()

        again = Sandbox.connect(made.sandbox_id, timeout=200)
        info = again.get_info()
        assert again.sandbox_id == made.sandbox_id and info.state.value == "running"
        assert info.metadata == {"kept": "yes"}
        assert again.files.read("/tmp/note") == ("before" if round == 0 else "changed")
        assert float(again.commands.run("date +%s.%N").stdout) > paused - 2, "the clock stood still"
        again.files.write("/tmp/note", "changed")

    follow = again.commands.connect(counter.pid)
    again.commands.send_stdin(counter.pid, "second\n")
    assert next(iter(follow))[0] == "2 second\n"
    follow.disconnect()

    # The end of a paused one needs no resume.
    made.beta_pause()
    assert Sandbox.kill(made.sandbox_id) is True
    with raises(SandboxNotFoundException):
        Sandbox.connect(made.sandbox_id)
