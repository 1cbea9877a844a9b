"""Requests to the page as no browser makes them."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

TIMEOUT_S = 30
SCRIPT = {"Leasehold-Page": "1", "Content-Type": "application/json"}


@dataclass
class Answer:
    """An answer."""

    status: int
    headers: dict[str, str]
    body: str

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass
class Client:
    """A client with a cookie, if it has logged in."""

    url: str
    cookie: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def request(
        self, method: str, path: str, body: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Makes a request. A header that is empty is left out."""
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT_S)
        try:
            sent = {"Cookie": self.cookie, **self.headers, **(headers or {})}
            connection.request(method, path, body, {name: one for name, one in sent.items() if one})
            found = connection.getresponse()
            return Answer(found.status, dict(found.getheaders()), found.read().decode())
        finally:
            connection.close()

    @contextmanager
    def stream(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """An answer that goes on."""
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers={"Cookie": self.cookie})
            yield connection.getresponse()
        finally:
            connection.close()

    @property
    def origin(self) -> str:
        """The origin of the page."""
        return self.url.rstrip("/")

    def get(self, path: str) -> Answer:
        """Reads."""
        return self.request("GET", path)

    def post(self, path: str, document: object, **headers: str) -> Answer:
        """Sends JSON as our scripts do."""
        return self.request("POST", path, json.dumps(document), {"Origin": self.origin, **SCRIPT, **headers})

    def log_in(self, token: str) -> Answer:
        """Logs in, and keeps the cookie."""
        answer = self.request(
            "POST",
            "/login",
            urlencode({"token": token}),
            {"Origin": self.origin, "Content-Type": "application/x-www-form-urlencoded"},
        )
        self.cookie = answer.headers.get("Set-Cookie", "").split(";")[0]
        return answer
