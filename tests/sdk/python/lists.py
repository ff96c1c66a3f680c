"""Lists of sandboxes: filters by metadata and state, and pages."""

import os
import uuid

from common import Sandbox, sandbox
from e2b import SandboxQuery, SandboxState

run = uuid.uuid4().hex


def ids(metadata, **options):
    """The IDs on each page."""
    state = options.pop("state", None)
    pages = Sandbox.list(query=SandboxQuery(metadata=metadata, state=state), **options)
    found = []
    while pages.has_next:
        found.append([item.sandbox_id for item in pages.next_items()])
    return found


with (
    sandbox(metadata={"run": run, "role": "mine & own=1"}) as first,
    sandbox(metadata={"run": run, "role": "other"}) as second,
):
    both = {first.sandbox_id, second.sandbox_id}
    (page,) = ids({"run": run})
    assert set(page) == both and len(page) == 2, page

    pages = ids({"run": run}, limit=1)
    assert [len(page) for page in pages if page] == [1, 1], pages
    assert {page[0] for page in pages if page} == both, pages

    assert ids({"run": run, "role": "mine & own=1"}) == [[first.sandbox_id]]
    assert ids({"run": run, "role": "none"}) == [[]]

    second.beta_pause()
    assert ids({"run": run}, state=[SandboxState.PAUSED]) == [[second.sandbox_id]]
    assert ids({"run": run}, state=[SandboxState.RUNNING]) == [[first.sandbox_id]]
    (page,) = ids({"run": run}, state=[SandboxState.RUNNING, SandboxState.PAUSED])
    assert set(page) == both, page

    assert ids({"run": run}, api_key=os.environ["OTHER_API_KEY"]) == [[]], "seen by others"

assert ids({"run": run}) == [[]], "killed ones are listed"
