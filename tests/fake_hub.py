"""A Hugging Face hub on this machine: one model, as huggingface_hub asks for it."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "c0ffee" + "0" * 34


@contextmanager
def served_hub(name: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of `folder` as model `name`.

    Yields the hub's URL, and the names of the files that were downloaded, in their order.
    """
    downloaded: list[str] = []
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            about, file = f"/api/models/{name}", path.removeprefix(f"/{name}/resolve/{COMMIT}/")
            if path.startswith(f"{about}/tree/"):
                tree = [
                    {"type": "file", "path": file, "size": len(data), "oid": _sha(data)}
                    for file, data in files.items()
                ]
                self._send(json.dumps(tree).encode())
            elif path.startswith(about):
                siblings = [{"rfilename": file} for file in files]
                self._send(json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
            elif file in files:
                if self.command == "GET":
                    downloaded.append(file)
                self._send(files[file])
            else:
                self._send(b"{}", 404)

        def _send(self, data: bytes, status: int = 200) -> None:
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("ETag", f'"{_sha(data)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloaded
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
