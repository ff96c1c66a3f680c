"""A TLS handshake over loopback with a certificate whose validity began ten minutes before the
Unix time given, checked by the client against the guest's clock."""
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

now = int(sys.argv[1])
where = tempfile.mkdtemp()
key, request, certificate, database = (
    os.path.join(where, name) for name in ("key", "request", "certificate", "database")
)


def stamp(at):
    return time.strftime("%Y%m%d%H%M%SZ", time.gmtime(at))


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


config = os.path.join(where, "config")
with open(config, "w") as file:
    file.write(f"""
[ca]
default_ca = own
[own]
database = {database}
new_certs_dir = {where}
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = extensions
[any]
commonName = supplied
[req]
distinguished_name = name
prompt = no
[name]
commonName = localhost
[extensions]
subjectAltName = DNS:localhost
basicConstraints = critical,CA:true
""")
open(database, "w").close()
openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
openssl("req", "-new", "-config", config, "-key", key, "-out", request)
openssl(
    "ca", "-batch", "-selfsign", "-notext", "-config", config, "-keyfile", key, "-in", request,
    "-out", certificate, "-startdate", stamp(now - 600), "-enddate", stamp(now + 86400),
)


def serve(listener):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    connection, _ = listener.accept()
    try:
        with context.wrap_socket(connection, server_side=True) as stream:
            stream.sendall(b"hello over TLS")
    except ssl.SSLError:
        # The client says why.
        connection.close()


listener = socket.create_server(("127.0.0.1", 0))
server = threading.Thread(target=serve, args=(listener,))
server.start()
context = ssl.create_default_context(cafile=certificate)
try:
    connection = socket.create_connection(listener.getsockname())
    with context.wrap_socket(connection, server_hostname="localhost") as stream:
        print(stream.recv(100).decode())
except ssl.SSLCertVerificationError as error:
    print(error.verify_message)
server.join()
