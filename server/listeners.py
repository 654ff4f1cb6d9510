"""The sockets that the server listens on, and TLS on them."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Final

from autellix.errors import ConfigError

#: The admin site's port is the server's plus this, unless it is told.
ADMIN_PORT_OFFSET: Final = 10_000


def bind(host: str, port: int, field: str = "port") -> socket.socket:
    """Return a bound socket.

    Raises:
        ConfigError: the address cannot be had; the message names ``field``.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        name = f"{field.removesuffix('port')}host"
        raise ConfigError(f"{name}: {host}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{field}: {host}:{port} cannot be listened on: {error}; allowed is a free port "
            "of an address of this machine, or 0 for any"
        ) from error
    return listener


def bind_admin(host: str, port: int | None, server_port: int) -> socket.socket:
    """Return the admin site's socket; a port that nobody asked for may be another one.

    Args:
        host: Its address.
        port: Its port; None: the server's and `ADMIN_PORT_OFFSET`, or a free one.
        server_port: As it was asked for.

    Raises:
        ConfigError: the address cannot be had.
    """
    if port is not None:
        return bind(host, port, "admin.port")
    wished = server_port + ADMIN_PORT_OFFSET if server_port else 0
    try:
        return bind(host, wished if wished <= 65535 else 0, "admin.port")
    except ConfigError:
        return bind(host, 0, "admin.port")


def tls_context(certificate: str, key: str) -> ssl.SSLContext | None:
    """Return what wraps the listening sockets; None without a certificate.

    Raises:
        ConfigError: one of the files is missing, or they do not fit each other.
    """
    if not certificate and not key:
        return None
    for field, path in (("tls_certificate", certificate), ("tls_key", key)):
        if not path or not Path(path).is_file():
            raise ConfigError(f"{field}: {path!r} is not allowed; allowed is a PEM file, and both")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls_certificate: {certificate!r} with tls_key {key!r}: {error}; allowed is a "
            "certificate chain and its private key, as PEM, without a password"
        ) from error
    return context
