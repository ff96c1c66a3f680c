"""Files and directories: write, read, list, rename, remove, and what is said of them."""

from common import raises, sandbox
from e2b import FileNotFoundException, FileType, InvalidArgumentException

with sandbox() as made:
    files = made.files

    written = files.write("notes/today.txt", "grüße\n")
    assert (written.path, written.name) == ("/home/user/notes/today.txt", "today.txt"), written
    assert files.read("notes/today.txt") == "grüße\n"
    assert files.read("/home/user/notes/today.txt", format="bytes") == "grüße\n".encode()
    assert files.write("notes/today.txt", "").path == "/home/user/notes/today.txt"
    assert files.read("notes/today.txt") == "", "it is cut short when it is written again"

    files.write("/root/secret", b"\x00\xff", user="root")
    assert files.read("/root/secret", format="bytes", user="root") == b"\x00\xff"
    info = files.get_info("/root/secret", user="root")
    assert (info.owner, info.group, info.size, info.type) == ("root", "root", 2, FileType.FILE), info

    for path in ("none", "/none/at/all"):
        with raises(FileNotFoundException):
            files.read(path)
        with raises(FileNotFoundException):
            files.get_info(path)
        with raises(FileNotFoundException):
            files.list(path)
        with raises(FileNotFoundException):
            files.rename(path, "/tmp/x")
        assert files.exists(path) is False
    with raises(InvalidArgumentException):
        files.read("/tmp")

    assert files.make_dir("tree/a/b") is True
    assert files.make_dir("tree/a/b") is False
    files.write("tree/a/file", "x")
    made.commands.run("ln -s a/file tree/link; chmod 640 tree/a/file")
    assert sorted(entry.name for entry in files.list("tree")) == ["a", "link"]
    deep = {entry.path: entry for entry in files.list("tree", depth=2)}
    top = "/home/user/tree"
    assert set(deep) == {f"{top}/a", f"{top}/link", f"{top}/a/b", f"{top}/a/file"}, set(deep)
    entry = deep[f"{top}/a/file"]
    assert (entry.type, entry.size, entry.mode & 0o777) == (FileType.FILE, 1, 0o640), entry
    assert (entry.owner, entry.permissions) == ("user", "-rw-r-----"), entry
    assert deep[f"{top}/a"].type == FileType.DIR
    assert deep[f"{top}/link"].symlink_target == f"{top}/a/file", deep[f"{top}/link"]

    moved = files.rename("tree/a/file", "tree/moved")
    assert moved.path == f"{top}/moved" and moved.size == 1, moved
    assert files.exists("tree/a/file") is False and files.read("tree/moved") == "x"

    files.remove("tree/moved")
    assert files.exists("tree/moved") is False
    files.remove("tree")
    assert files.exists("tree") is False, "a directory goes with all in it"
