"""What the scenarios share: a limit on their time, and sandboxes that are gone when they end."""

import atexit
import contextlib
import faulthandler
import os
import time

# A hang shows where it is, and ends well before anybody gives up on the whole run.
faulthandler.dump_traceback_later(150, exit=True)

from e2b import Sandbox  # noqa: E402

URL = os.environ["E2B_API_URL"]


@contextlib.contextmanager
def sandbox(template=None, **options):
    """A sandbox that is killed in the end."""
    options.setdefault("timeout", 300)
    made = Sandbox.create(template, **options)
    try:
        yield made
    finally:
        made.kill()


@contextlib.contextmanager
def raises(kind, words=""):
    """Checks that the block raises exactly this kind of exception, and with these words in it."""
    try:
        yield
    except Exception as error:
        assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"no {kind.__name__}")


_begun = time.monotonic()
if os.environ.get("COPPICE_TIMES"):
    atexit.register(lambda: print(f"{time.monotonic() - _begun:.2f} s"))
