"""What happens when the time is over: the sandbox is killed, or paused and resumed on demand."""

import time

from common import Sandbox, raises, sandbox
from e2b import SandboxNotFoundException


def until(state, sandbox_id):
    """Waits for a sandbox to be in this state."""
    while Sandbox.get_info(sandbox_id).state.value != state:
        time.sleep(0.2)


with (
    sandbox(timeout=300) as killed,
    sandbox(timeout=300, lifecycle={"on_timeout": "pause"}) as paused,
    sandbox(timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": True}) as resumed,
):
    for made in (paused, resumed):
        made.files.write("/tmp/note", "kept")
    for made in (killed, paused, resumed):
        made.set_timeout(1)

    until("paused", paused.sandbox_id)
    again = Sandbox.connect(paused.sandbox_id, timeout=60)
    assert again.files.read("/tmp/note") == "kept"

    until("paused", resumed.sandbox_id)
    assert resumed.files.read("/tmp/note") == "kept", "its traffic resumes it"
    info = resumed.get_info()
    assert info.state.value == "running"
    left = info.end_at.timestamp() - time.time()
    assert 200 < left <= 310, f"{left} s, not the five minutes that traffic gives"

    for _ in range(100):
        if not killed.is_running():
            break
        time.sleep(0.2)
    with raises(SandboxNotFoundException):
        killed.get_info()
