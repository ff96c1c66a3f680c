"""Commands in the background: listed, connected to by their process ID, and killed."""

from common import Sandbox, raises, sandbox
from e2b import CommandExitException

with sandbox() as made:
    commands = made.commands
    commands.run("mkfifo /tmp/go")

    handle = commands.run("cat /tmp/go; echo end; exit 3", background=True)
    (listed,) = [process for process in commands.list() if process.pid == handle.pid]
    assert "cat /tmp/go" in " ".join([listed.cmd, *listed.args]), listed
    handle.disconnect()

    again = Sandbox.connect(made.sandbox_id).commands.connect(handle.pid)
    commands.run("echo through > /tmp/go")
    try:
        again.wait()
        raise AssertionError("exit code 3 is no failure")
    except CommandExitException as failed:
        assert (failed.exit_code, failed.stdout) == (3, "through\nend\n"), failed

    handle = commands.run("sleep 1000", background=True)
    assert handle.kill() is True
    with raises(CommandExitException):
        handle.wait()
    assert commands.kill(handle.pid) is False, "it is killed already"
    assert handle.pid not in [process.pid for process in commands.list()]

    handle = commands.run("sleep 1000", background=True)
    assert commands.kill(handle.pid) is True
    with raises(CommandExitException):
        handle.wait()
