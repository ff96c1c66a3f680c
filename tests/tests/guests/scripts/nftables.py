"""Makes an nftables rule that drops datagrams to one port, and sends to it and to another."""
import itertools
import socket
import struct

NETLINK_NETFILTER, NFPROTO_IPV4, NFNL_SUBSYS_NFTABLES = 12, 2, 10
BATCH_BEGIN, BATCH_END = 16, 17
NEWTABLE, NEWCHAIN, NEWRULE = 0, 3, 6
REQUEST, ACK, CREATE, APPEND, NESTED = 1, 4, 0x400, 0x800, 0x8000
LOCAL_OUT, DROP, VERDICT_REGISTER, REGISTER = 3, 0, 0, 1
BLOCKED, OPEN = 4001, 4002

numbers = itertools.count(1)


def attribute(kind, data):
    padding = b"\0" * (-len(data) % 4)
    return struct.pack("=HH", len(data) + 4, kind) + data + padding


def nested(kind, *attributes):
    return attribute(kind | NESTED, b"".join(attributes))


def text(kind, value):
    return attribute(kind, value.encode() + b"\0")


def number(kind, value):
    return attribute(kind, struct.pack(">I", value))


def message(kind, flags, family, resource, body=b""):
    body = struct.pack(">BBH", family, 0, resource) + body
    return struct.pack("=IHHII", len(body) + 16, kind, flags, next(numbers), 0) + body


def command(kind, flags, *attributes):
    kind |= NFNL_SUBSYS_NFTABLES << 8
    flags |= REQUEST | ACK | CREATE
    return message(kind, flags, NFPROTO_IPV4, 0, b"".join(attributes))


def expression(name, *attributes):
    return nested(1, text(1, name), nested(2, *attributes))


rule = [
    # The destination port, which is at offset 2 of the transport header (base 2).
    expression("payload", number(1, REGISTER), number(2, 2), number(3, 2), number(4, 2)),
    expression(
        "cmp", number(1, REGISTER), number(2, 0), nested(3, attribute(1, struct.pack(">H", BLOCKED)))
    ),
    expression("counter"),
    expression("immediate", number(1, VERDICT_REGISTER), nested(2, nested(2, number(1, DROP)))),
]
batch = [
    message(BATCH_BEGIN, REQUEST, 0, NFNL_SUBSYS_NFTABLES),
    command(NEWTABLE, 0, text(1, "t")),
    command(
        NEWCHAIN, 0, text(1, "t"), text(3, "c"), nested(4, number(1, LOCAL_OUT), number(2, 0)),
        text(7, "filter"),
    ),
    command(NEWRULE, APPEND, text(1, "t"), text(2, "c"), nested(4, *rule)),
    message(BATCH_END, REQUEST, 0, NFNL_SUBSYS_NFTABLES),
]
netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
netlink.bind((0, 0))
netlink.send(b"".join(batch))
answers = 0
while answers < 3:
    data = netlink.recv(65536)
    while data:
        length, kind = struct.unpack_from("=IH", data)
        (code,) = struct.unpack_from("=i", data, 16)
        assert kind == 2 and code == 0, f"netlink error {code}"
        answers += 1
        data = data[length + -length % 4 :]

sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in (BLOCKED, OPEN):
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", port))
    try:
        sender.sendto(b"hello", ("127.0.0.1", port))
        print(port, receiver.recv(16).decode())
    except PermissionError:
        print(port, "dropped")
