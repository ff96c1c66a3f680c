"""What a sandbox uses: processors, memory and disk."""

import time

from common import sandbox

with sandbox() as made:
    info = made.get_info()
    found = made.get_metrics()
    while not found:
        time.sleep(0.5)
        found = made.get_metrics()
    last = found[-1]
    assert last.cpu_count == info.cpu_count, last
    assert 0 <= last.cpu_used_pct <= 100 * info.cpu_count, last
    assert 0 < last.mem_used < last.mem_total <= info.memory_mb << 20, last
    assert 0 < last.disk_used < last.disk_total, last
    assert abs(last.timestamp.timestamp() - time.time()) < 120, last
