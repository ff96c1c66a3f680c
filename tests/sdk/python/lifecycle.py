"""A sandbox from create to kill: what it says of itself, its timeout, and a second kill."""

from datetime import datetime, timedelta, timezone

from common import Sandbox, sandbox

with sandbox(metadata={"owner": "lifecycle"}, envs={"GREETING": "hello"}, timeout=100) as made:
    info = made.get_info()
    assert info.sandbox_id == made.sandbox_id and info.template_id
    assert info.metadata == {"owner": "lifecycle"}, info.metadata
    assert info.state.value == "running", info.state
    assert info.cpu_count >= 1 and info.memory_mb >= 128
    now = datetime.now(timezone.utc)
    assert abs(info.end_at - info.started_at - timedelta(seconds=100)) < timedelta(seconds=5)
    assert abs(now - info.started_at) < timedelta(seconds=60), "the clocks differ"

    made.set_timeout(1000)
    later = made.get_info().end_at
    assert timedelta(seconds=900) < later - now < timedelta(seconds=1100), later

    assert made.is_running()
    assert made.commands.run("echo $GREETING").stdout == "hello\n"

    assert made.kill() is True
    assert made.is_running() is False
    assert made.kill() is False
    assert Sandbox.kill(made.sandbox_id) is False
