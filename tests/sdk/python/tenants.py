"""Keys: a wrong one is refused, and another tenant's sandbox is as good as not there."""

import os

from common import Sandbox, raises, sandbox
from e2b import AuthenticationException, SandboxException, SandboxNotFoundException

other = {"api_key": os.environ["OTHER_API_KEY"]}

with raises(AuthenticationException):
    Sandbox.create(api_key="e2b_" + "0" * 40)
with raises(AuthenticationException):
    Sandbox.list(api_key="e2b_" + "0" * 40).next_items()

with sandbox() as made:
    snapshot = made.create_snapshot()

    with raises(SandboxNotFoundException):
        Sandbox.connect(made.sandbox_id, **other)
    with raises(SandboxNotFoundException):
        Sandbox.get_info(made.sandbox_id, **other)
    with raises(SandboxNotFoundException):
        Sandbox.set_timeout(made.sandbox_id, 1, **other)
    with raises(SandboxNotFoundException):
        Sandbox.beta_pause(made.sandbox_id, **other)
    with raises(SandboxNotFoundException):
        Sandbox.create_snapshot(made.sandbox_id, **other)
    with raises(SandboxNotFoundException):
        Sandbox.get_metrics(made.sandbox_id, **other)
    assert Sandbox.kill(made.sandbox_id, **other) is False
    if hasattr(Sandbox, "fork"):
        with raises(SandboxNotFoundException):
            Sandbox.fork(made.sandbox_id, **other)

    with raises(SandboxException, "was not found"):
        Sandbox.create(snapshot.snapshot_id, **other)
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **other) is False
    assert Sandbox.list_snapshots(**other).next_items() == []
    assert Sandbox.list_snapshots(made.sandbox_id, **other).next_items() == []

    # Its own tenant sees it as it was.
    assert made.commands.run("echo untouched").stdout == "untouched\n"
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
