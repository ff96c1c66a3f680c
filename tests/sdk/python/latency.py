"""How long it takes from asking for a sandbox to the first output of a command in it.

SAMPLES and CONCURRENCY say how much is measured; a line of JSON tells the result, in milliseconds.
The command prints what only this sample knows, so that nothing else can be taken for its output.
"""

import json
import os
import re
import threading
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor

from common import URL, Sandbox, faulthandler

SAMPLES = int(os.environ.get("SAMPLES", 4))
CONCURRENCY = int(os.environ.get("CONCURRENCY", 2))

# Many at once take longer than a scenario may.
faulthandler.dump_traceback_later(150 + 20 * SAMPLES, exit=True)


def sample(_):
    token = uuid.uuid4().hex
    came = threading.Event()
    output = []

    def take(data):
        if not output:
            times.append(time.perf_counter())
        output.append(data)
        came.set()

    times = [time.perf_counter()]
    made = Sandbox.create(timeout=600, request_timeout=600)
    try:
        times.append(time.perf_counter())
        made.commands.run(f"echo {token}", on_stdout=take, timeout=600, request_timeout=600)
        assert came.is_set() and "".join(output) == f"{token}\n", output
    finally:
        made.kill(request_timeout=600)
    begun, created, first = times
    return (created - begun) * 1000, (first - begun) * 1000


def stages():
    """Seconds that each stage took so far, and how often it was passed."""
    with urllib.request.urlopen(f"{URL}/metrics") as response:
        text = response.read().decode()
    line = re.compile(r'^coppice_stage_seconds_(sum|count)\{stage="(\w+)"\} (\S+)$', re.M)
    found = {}
    for kind, stage, value in line.findall(text):
        found.setdefault(stage, {})[kind] = float(value)
    return found


def percentiles(values):
    values = sorted(values)
    rank = lambda percent: values[max(0, -(-len(values) * percent // 100) - 1)]
    return {f"p{percent}": round(rank(percent), 1) for percent in (50, 95, 99)}


# What only the first one pays for: imports, the connection, the machines made ahead.
sample(None)
before = stages()
with ThreadPoolExecutor(CONCURRENCY) as threads:
    taken = list(threads.map(sample, range(SAMPLES)))
after = stages()

# Those of others who use the daemon meanwhile are among them.
creates = after["create"]["count"] - before["create"]["count"]
assert creates >= SAMPLES, f"{creates} creates for {SAMPLES} samples"
whole = after["create"]["sum"] - before["create"]["sum"]
shares = {}
for stage in ("queue", "shell", "restore", "prove"):
    took = after[stage]["sum"] - before[stage]["sum"]
    shares[stage] = {"mean_ms": round(took * 1000 / creates, 1), "share": round(took / whole, 3)}
report = {
    "samples": SAMPLES,
    "concurrency": CONCURRENCY,
    "create": percentiles([create for create, _ in taken]),
    "first_output": percentiles([first for _, first in taken]),
    "daemon_create_mean_ms": round(whole * 1000 / creates, 1),
    "stages": shares,
}
assert report["create"]["p50"] <= report["first_output"]["p50"], report
print(json.dumps(report))
