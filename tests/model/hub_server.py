"""A model hub on localhost: as much of the hub's HTTP interface as a download needs."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubStandIn:
    """Repositories by id, each a folder whose files are served, and the paths that were asked for."""

    endpoint: str
    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)

    def respond(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        self.requests.append(path)
        parts = path.partition("?")[0].strip("/").split("/")
        if parts == [""]:
            return 200, {}, b"hub"
        api = parts[:2] == ["api", "models"]
        repository = "/".join(parts[2:4] if api else parts[:2])
        rest = parts[4:] if api else parts[2:]
        if repository in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        folder = self.repositories.get(repository)
        if folder is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if rest and rest[1] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if api:
            return 200, {"Content-Type": "application/json"}, json.dumps(_listing(folder, rest)).encode()
        file = folder / "/".join(rest[2:])
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        data = file.read_bytes()
        return 200, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, data


def _listing(folder: Path, rest: list[str]) -> object:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if rest[:1] == ["tree"]:
        return [
            {
                "type": "file",
                "path": str(path.relative_to(folder)),
                "size": path.stat().st_size,
                "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
            }
            for path in files
        ]
    names = [{"rfilename": str(path.relative_to(folder))} for path in files]
    return {"id": "x/y", "sha": COMMIT, "siblings": names, "private": False, "tags": [], "downloads": 0}


@contextmanager
def hub_server() -> Iterator[HubStandIn]:
    """Serves until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.respond(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = HubStandIn(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
