"""Terminals: input, output, size, another client, and the end."""

from common import Sandbox, sandbox
from e2b import CommandExitException, PtySize


class Screen:
    """Collects what a terminal shows."""

    def __init__(self, handle):
        self.text, self.events = b"", iter(handle)

    def until(self, words):
        """Reads until these words have come."""
        while words not in self.text:
            _, _, shown = next(self.events)
            self.text += shown or b""
        self.text = self.text.split(words, 1)[1]


with sandbox() as made:
    handle = made.pty.create(PtySize(rows=30, cols=100), envs={"MARK": "from-env"}, cwd="/usr/share")
    screen = Screen(handle)
    # What is typed is shown too, so the words to wait for are not in it.
    made.pty.send_stdin(handle.pid, b'echo "[$MARK]" "[$PWD]" "[$(stty size)]" "[$(id -un)]"\n')
    screen.until(b"[from-env] [/usr/share] [30 100] [user]")

    made.pty.resize(handle.pid, PtySize(rows=50, cols=132))
    made.pty.send_stdin(handle.pid, b'echo "[$(stty size)]"\n')
    screen.until(b"[50 132]")

    # Ctrl-C ends what runs in it, and not the shell.
    made.pty.send_stdin(handle.pid, b"sh -c 'echo wait-$((6*7)); exec sleep 1000'\n")
    screen.until(b"wait-42")
    made.pty.send_stdin(handle.pid, b"\x03")
    made.pty.send_stdin(handle.pid, b"echo on-$((6*7))\n")
    screen.until(b"on-42")

    handle.disconnect()
    again = Screen(Sandbox.connect(made.sandbox_id).pty.connect(handle.pid))
    made.pty.send_stdin(handle.pid, b"echo again-$((6*7))\n")
    again.until(b"again-42")

    assert made.pty.kill(handle.pid) is True
    # It is killed some time after it was asked for.
    for _ in again.events:
        pass
    assert made.pty.kill(handle.pid) is False

    handle = made.pty.create(PtySize(rows=24, cols=80))
    made.pty.send_stdin(handle.pid, b"exit 5\n")
    try:
        handle.wait()
        raise AssertionError("exit code 5 is no failure")
    except CommandExitException as failed:
        assert failed.exit_code == 5
