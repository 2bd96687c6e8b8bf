"""Whose request it is: an opaque name, so that nothing behind the HTTP layer ever holds a key."""

import secrets
from hashlib import blake2b

from starlette.datastructures import Headers

# Where clients and proxies put credentials.
CREDENTIAL_HEADERS = ("authorization", "api-key", "x-api-key")


class Scopes:
    """Names requests by their credentials; those without any share one scope.

    The server checks no keys; a proxy in front may. A client that sends another's key is that other to both.

    Args:
        secret: Key of the digest, so that a name cannot be found out by trying keys; drawn anew if None.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def name(self, headers: Headers) -> str:
        """The scope of a request with these headers; empty without credentials, which a blank header is."""
        credentials = [
            (header, [value for value in headers.getlist(header) if value.strip()])
            for header in CREDENTIAL_HEADERS
        ]
        if not any(values for _, values in credentials):
            return ""
        return blake2b(repr(credentials).encode(), key=self._secret, digest_size=16).hexdigest()
