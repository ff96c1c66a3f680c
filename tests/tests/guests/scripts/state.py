"""A process that holds a growing dictionary, and the questions to it.

`serve` runs it; `grow N` adds N entries that nobody could foresee; `digest` tells how many there
are and a hash over all of them in their order.
"""
import hashlib
import os
import socket
import sys
import time

PATH = "/tmp/state.socket"


def serve():
    state = {}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(PATH)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        verb, _, count = connection.recv(100).decode().partition(" ")
        for _ in range(int(count or 0)):
            state[os.urandom(8).hex()] = {"number": len(state), "time": time.time_ns()}
        digest = hashlib.sha256(repr(state).encode()).hexdigest()
        connection.sendall(f"{verb} {len(state)} {id(state)} {os.getpid()} {digest}".encode())
        connection.close()


def ask(question):
    for _ in range(600):
        try:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(PATH)
            break
        except OSError:
            # Python takes a while to start; its socket tells when it has.
            time.sleep(0.1)
    connection.sendall(question.encode())
    print(connection.recv(1000).decode())


if sys.argv[1] == "serve":
    serve()
else:
    ask(sys.argv[1])
