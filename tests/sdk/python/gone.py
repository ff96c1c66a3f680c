"""What is not there: a gone sandbox and a closed port, as the SDK tells them."""

from urllib.error import HTTPError

from common import Sandbox, fetch, raises, sandbox
from e2b import SandboxNotFoundException, TimeoutException

with sandbox() as made:
    host = made.get_host(4321)
    try:
        fetch(host, "/")
        raise AssertionError("a closed port answers")
    except HTTPError as error:
        answer = error.read().decode()
        assert error.code == 502 and "port is not open" in answer, (error.code, answer)

    made.kill()
    with raises(SandboxNotFoundException):
        made.get_info()
    with raises(SandboxNotFoundException):
        made.set_timeout(100)
    with raises(SandboxNotFoundException):
        made.beta_pause()
    with raises(SandboxNotFoundException):
        Sandbox.connect(made.sandbox_id)
    for use in (
        lambda: made.commands.run("true"),
        lambda: made.commands.list(),
        lambda: made.files.read("/etc/hostname"),
        lambda: made.files.write("/tmp/x", "x"),
        lambda: made.files.list("/"),
    ):
        try:
            use()
            raise AssertionError("a gone sandbox works")
        except (SandboxNotFoundException, TimeoutException) as error:
            assert "not found" in str(error), error
    try:
        fetch(host, "/")
        raise AssertionError("a gone sandbox answers")
    except HTTPError as error:
        assert error.code == 502 and "was not found" in error.read().decode()
