"""Snapshots: sandboxes made from them, their list, and their removal."""

from common import Sandbox, raises, sandbox
from e2b import SandboxException

with sandbox() as made:
    made.files.write("/tmp/note", "one")
    made.commands.run("sleep 1000", background=True).disconnect()
    snapshot = made.create_snapshot()
    assert made.is_running()
    made.files.write("/tmp/note", "two")

    with sandbox(snapshot.snapshot_id) as first, sandbox(snapshot.snapshot_id) as second:
        assert len({made.sandbox_id, first.sandbox_id, second.sandbox_id}) == 3
        first.files.write("/tmp/mine", "first")
        for copy in (first, second):
            assert copy.files.read("/tmp/note") == "one"
            assert copy.commands.run("pgrep -c -x sleep").stdout == "1\n", "processes go with it"
        assert second.files.exists("/tmp/mine") is False
        assert made.files.read("/tmp/note") == "two"

        pages = made.list_snapshots()
        assert [item.snapshot_id for item in pages.next_items()] == [snapshot.snapshot_id]
        seen = []
        pages = Sandbox.list_snapshots()
        while pages.has_next:
            seen += [item.snapshot_id for item in pages.next_items()]
        assert snapshot.snapshot_id in seen

        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
        assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
        assert made.list_snapshots().next_items() == []
        with raises(SandboxException, "was not found"):
            Sandbox.create(snapshot.snapshot_id)
        assert first.files.read("/tmp/mine") == "first", "what was made from it lives on"
