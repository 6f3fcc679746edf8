"""Where the router listens, and what it writes about what it does."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from kvferry.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The router's own side, apart from how it serves.

    Raises:
        UsageError: two of the values do not go together.
    """

    host: str = "127.0.0.1"
    port: int = 0
    ssl_certfile: str = ""
    """A PEM file with the certificate and its chain; with it the router speaks TLS."""
    ssl_keyfile: str = ""
    """Its key; empty when it is in the same file."""
    engine_ca_file: str = ""
    """The authorities that https engines are checked against; empty for the system's."""
    access_log: str = ""
    """A file, `-` for standard output, empty for none."""
    otlp_endpoint: str = ""
    """Where OpenTelemetry spans are sent by OTLP over HTTP; empty for none."""

    def __post_init__(self) -> None:
        if self.ssl_keyfile and not self.ssl_certfile:
            raise UsageError("--ssl-keyfile: needs --ssl-certfile, the certificate that the key belongs to")

    def tls(self) -> ssl.SSLContext | None:
        """The server's side of TLS; None without a certificate.

        Raises:
            UsageError: the files cannot be used.
        """
        if not self.ssl_certfile:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.load_certificate(context)
        return context

    def load_certificate(self, context: ssl.SSLContext) -> None:
        """Read the certificate, also anew, for the connections from now on.

        Raises:
            UsageError: the files cannot be used.
        """
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile or None, password="")
        except (OSError, ssl.SSLError) as error:
            told = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise UsageError(
                f"--ssl-certfile, --ssl-keyfile: {self.ssl_certfile} cannot be used: {told}"
            ) from error

    def engine_tls(self) -> ssl.SSLContext:
        """The client's side of TLS, towards https engines.

        Raises:
            UsageError: the file of authorities cannot be read.
        """
        try:
            return ssl.create_default_context(cafile=self.engine_ca_file or None)
        except (OSError, ssl.SSLError) as error:
            told = getattr(error, "strerror", None) or error
            raise UsageError(f"--engine-ca-file: {self.engine_ca_file} cannot be used: {told}") from error
