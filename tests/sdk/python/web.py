"""Servers in the guest: reached at a host of their own, by HTTP and by WebSocket."""

import base64
import os
import socket
import time
from urllib.error import HTTPError
from urllib.parse import urlsplit

from common import URL, fetch, sandbox

# Serves files on one port; on the other it answers an upgrade, then sends back each frame it gets.
SERVERS = '''
import base64, functools, hashlib, http.server, socket, threading
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory="/srv/www")
echo = socket.create_server(("127.0.0.1", 9000))
files = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), handler)
threading.Thread(target=files.serve_forever).start()
while True:
    client, _ = echo.accept()
    stream = client.makefile("rwb")
    head = list(iter(stream.readline, b"\\r\\n"))
    (key,) = [line.split()[1] for line in head if line.lower().startswith(b"sec-websocket-key:")]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    stream.write(b"HTTP/1.1 101 Switching Protocols\\r\\nConnection: Upgrade\\r\\n"
                 b"Upgrade: websocket\\r\\nSec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
    stream.flush()
    while frame := stream.read(2 + 4 + 5):
        masked, mask = frame[6:], frame[2:6]
        stream.write(b"\\x81\\x05" + bytes(a ^ mask[i % 4] for i, a in enumerate(masked)))
        stream.flush()
'''


def serving(host, path="/"):
    """Waits until a port is open, then fetches."""
    while True:
        try:
            return fetch(host, path)
        except HTTPError as error:
            answer = error.read().decode()
            assert error.code == 502 and "port is not open" in answer, (error.code, answer)
            time.sleep(0.2)


with sandbox() as made:
    data = os.urandom(1 << 20)
    made.files.write_files([
        {"path": "/srv/www/hello.txt", "data": "hello\n"},
        {"path": "/srv/www/big", "data": data},
        {"path": "/tmp/serve.py", "data": SERVERS},
    ], user="root")
    made.commands.run("python3 /tmp/serve.py", background=True, timeout=0)

    host = made.get_host(8000)
    assert host.split(".")[0] == f"8000-{made.sandbox_id}", host
    assert serving(host, "/hello.txt") == b"hello\n"
    assert fetch(host, "/big") == data
    try:
        fetch(host, "/none")
        raise AssertionError("a missing page is there")
    except HTTPError as error:
        assert error.code == 404, "the server's own answer is passed on"

    address = urlsplit(URL)
    with socket.create_connection((address.hostname, address.port)) as connection:
        stream = connection.makefile("rwb")
        key = base64.b64encode(os.urandom(16)).decode()
        stream.write(
            f"GET /chat HTTP/1.1\r\nHost: {made.get_host(9000)}\r\nConnection: Upgrade\r\n"
            f"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        stream.flush()
        head = list(iter(stream.readline, b"\r\n"))
        assert head[0].startswith(b"HTTP/1.1 101 "), head
        for word in (b"hello", b"again"):
            mask = os.urandom(4)
            stream.write(b"\x81\x85" + mask + bytes(a ^ mask[i % 4] for i, a in enumerate(word)))
            stream.flush()
            assert stream.read(7) == b"\x81\x05" + word
