"""What the scenarios share: a limit on their time, and sandboxes that are gone when they end."""

import atexit
import contextlib
import faulthandler
import os
import sys
import traceback
import urllib.request
from urllib.parse import urlsplit

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


def fetch(host, target, data=None, headers={}):
    """Asks the gateway as it is asked for this host, which is resolved nowhere but in production."""
    split = urlsplit(target)
    path = split.path + (f"?{split.query}" if split.query else "")
    request = urllib.request.Request(URL + path, data=data, headers={**headers, "Host": host})
    with urllib.request.urlopen(request) as response:
        return response.read()


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


def _end(kind=None, error=None, trace=None):
    """Ends at once: native threads of some versions abort now and then if the interpreter ends
    while they live, and the scenario is over by then."""
    if kind:
        traceback.print_exception(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if kind else 0)


sys.excepthook = _end
atexit.register(_end)
