"""Big and binary files, several at once, and signed addresses."""

import hashlib
import os
from urllib.error import HTTPError

from common import fetch, raises, sandbox

MIB = 1 << 20

with sandbox() as made:
    files = made.files

    def digest(path):
        return made.commands.run(f"sha256sum < {path}").stdout.split()[0]

    data = os.urandom(8 * MIB)
    files.write("/tmp/big", data)
    assert digest("/tmp/big") == hashlib.sha256(data).hexdigest()
    back = files.read("/tmp/big", format="bytes")
    assert bytes(back) == data, "the content comes back changed"
    size, sum = 0, hashlib.sha256()
    for chunk in files.read("/tmp/big", format="stream"):
        size += len(chunk)
        sum.update(chunk)
    assert size == len(data) and sum.hexdigest() == hashlib.sha256(data).hexdigest()

    contents = {f"/tmp/many/{name}": os.urandom(size) for name, size in
                (("empty", 0), ("one", 1), ("ä b", 1000), ("deep/er", 100_000))}
    written = files.write_files([{"path": path, "data": data} for path, data in contents.items()])
    assert [entry.path for entry in written] == list(contents), written
    for path, data in contents.items():
        assert bytes(files.read(path, format="bytes")) == data, path

    # As a browser would: the address alone is enough, for as long as it says.
    host = made.get_host(49983)
    url = made.download_url("/tmp/many/one", use_signature_expiration=60)
    assert fetch(host, url) == contents["/tmp/many/one"]
    with raises(HTTPError, "401"):
        fetch(host, url.replace("many%2Fone", "many%2Fempty"))
    with raises(HTTPError, "401"):
        fetch(host, made.download_url("/tmp/many/one", use_signature_expiration=-60))
