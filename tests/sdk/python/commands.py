"""Commands in the foreground: their output, exit codes, environment, directory and user."""

from common import sandbox
from e2b import CommandExitException

with sandbox(envs={"FROM_SANDBOX": "one", "BOTH": "sandbox"}) as made:
    run = made.commands.run

    result = run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0), result

    try:
        run("echo before; echo why >&2; exit 7")
        raise AssertionError("exit code 7 is no failure")
    except CommandExitException as failed:
        assert failed.exit_code == 7
        assert (failed.stdout, failed.stderr) == ("before\n", "why\n"), failed

    try:
        run("kill -KILL $$")
        raise AssertionError("a signal is no failure")
    except CommandExitException as failed:
        assert failed.exit_code != 0

    told = []
    run("echo 1; echo 2 >&2", on_stdout=lambda t: told.append(t), on_stderr=lambda t: told.append(t))
    assert sorted("".join(told).split()) == ["1", "2"], told

    words = "$FROM_SANDBOX $FROM_COMMAND $BOTH"
    result = run(f'echo "{words}"', envs={"FROM_COMMAND": "two", "BOTH": "command"})
    assert result.stdout == "one two command\n", result

    assert run("pwd", cwd="/usr/share").stdout == "/usr/share\n"
    assert run("id -un; echo $HOME; pwd").stdout == "user\n/home/user\n/home/user\n"
    assert run("id -u; echo $HOME", user="root").stdout == "0\n/root\n"

    assert run("printf 'ä€😀'").stdout == "ä€😀"
    assert run("cat").stdout == "", "standard input is empty"
