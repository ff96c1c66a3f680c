"""Watches of directories: what happens in them is told, deeper ones too where asked for."""

import time

from common import raises, sandbox
from e2b import FileNotFoundException, FilesystemEventType

with sandbox() as made:
    files = made.files

    def events(handle, *wanted):
        """Asks for events until these have come."""
        missing, seen = set(wanted), []
        while missing:
            seen += handle.get_new_events()
            missing -= {(event.type, event.name) for event in seen}
            if missing:
                time.sleep(0.1)
        return seen

    kind = FilesystemEventType
    files.make_dir("w/deep")
    shallow = files.watch_dir("w")
    deep = files.watch_dir("w", recursive=True)

    files.write("w/new", "x")
    for handle in (shallow, deep):
        events(handle, (kind.CREATE, "new"), (kind.WRITE, "new"))
    files.rename("w/new", "w/renamed")
    for handle in (shallow, deep):
        events(handle, (kind.RENAME, "new"))
    files.remove("w/renamed")
    events(deep, (kind.REMOVE, "renamed"))

    files.write("w/deep/file", "x")
    events(deep, (kind.CREATE, "deep/file"))
    # What is made later is watched as well.
    files.make_dir("w/later")
    events(deep, (kind.CREATE, "later"))
    files.write("w/later/file", "x")
    events(deep, (kind.CREATE, "later/file"))

    # All that happened before has been told by then.
    files.write("w/last", "x")
    seen = events(shallow, (kind.CREATE, "last"))
    assert not [event for event in seen if "/" in event.name], seen

    shallow.stop()
    with raises(FileNotFoundException):
        files.watch_dir("none")
