"""Forks: copies of a running sandbox, which go their own ways."""

from common import raises, sandbox

with sandbox(metadata={"kept": "yes"}) as made:
    made.files.write("/tmp/note", "one")
    copies = made.fork(count=2, timeout=100)
    try:
        assert len({made.sandbox_id, *(copy.sandbox_id for copy in copies)}) == 3
        assert made.is_running()
        copies[0].files.write("/tmp/note", "two")
        assert copies[1].files.read("/tmp/note") == "one"
        assert made.files.read("/tmp/note") == "one"
        assert copies[0].files.read("/tmp/note") == "two"
        assert copies[1].commands.run("echo runs").stdout == "runs\n"
    finally:
        for copy in copies:
            copy.kill()
