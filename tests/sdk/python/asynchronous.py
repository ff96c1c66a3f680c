"""The asynchronous client, which streams where the other asks again and again."""

import asyncio

from common import raises
from e2b import AsyncSandbox, CommandExitException, FilesystemEventType, TimeoutException


async def main():
    made = await AsyncSandbox.create(timeout=300)
    try:
        told = []
        result = await made.commands.run("echo 1; echo 2 >&2; echo 3", on_stdout=told.append)
        assert (result.stdout, "".join(told)) == ("1\n3\n", "1\n3\n")

        several = [made.commands.run(f"sleep 1; echo {n}") for n in range(5)]
        assert [r.stdout for r in await asyncio.gather(*several)] == [f"{n}\n" for n in range(5)]

        with raises(TimeoutException):
            await made.commands.run("sleep 1000", timeout=1)
        handle = await made.commands.run("sleep 1000", background=True)
        await handle.kill()
        with raises(CommandExitException):
            await handle.wait()

        await made.files.make_dir("w/deep")
        seen = asyncio.Queue()
        watch = await made.files.watch_dir("w", on_event=seen.put_nowait, recursive=True)
        await made.files.write_files([{"path": "w/deep/file", "data": "x"}])
        event = await asyncio.wait_for(seen.get(), 30)
        assert (event.type, event.name) == (FilesystemEventType.CREATE, "deep/file"), event
        await watch.stop()

        chunks = [chunk async for chunk in await made.files.read("w/deep/file", format="stream")]
        assert b"".join(chunks) == b"x"
    finally:
        assert await made.kill() is True


asyncio.run(main())
