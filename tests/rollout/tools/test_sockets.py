"""The sockets below the MCP clients, against real HTTP servers."""

import asyncio
import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest

from agentrl.limited_httpx import AnswerCompressed, tls_context
from agentrl.rollout.tools.sockets import Sockets


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the path says, and keeps what it got."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, int, dict[str, str], bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        port = self.client_address[1]
        self.seen.append((self.path, port, dict(self.headers), body))
        if self.path == "/vanish":
            self.close_connection = True
            return
        self.send_response(307 if self.path == "/elsewhere" else 200, "As It Is")
        if self.path == "/elsewhere":
            self.send_header("Location", "/here")
        if self.path == "/packed":
            self.send_header("Content-Encoding", "gzip")
        length = 10 if self.path == "/short" else 4
        self.send_header("Content-Length", str(length))
        self.send_header("X-Long", "x" * 20_000)
        self.end_headers()
        self.wfile.write(b"body")
        if self.path == "/twice":
            self.wfile.flush()
            time.sleep(0.1)  # the first answer was taken
            self.wfile.write(b"HTTP/1.1 200 Again\r\nContent-Length: 5\r\n\r\nagain")
        self.close_connection = self.path in ("/last", "/short")  # and says nothing of it

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def server() -> Iterator[tuple[str, type[Handler]]]:
    """A server in threads, so that it works while the event loop is busy."""
    handler = type("OwnHandler", (Handler,), {"seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        serving.daemon_threads = True
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}", handler
        serving.shutdown()


def client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=Sockets(tls_context(), connect_timeout_s=5.0), timeout=None,
        headers={"Authorization": "Bearer t"},
    )  # fmt: skip


async def test_a_request_goes_out_as_it_is_and_its_answer_comes_back_whole() -> None:
    with server() as (url, handler):
        async with client() as http:
            for _ in range(2):
                answer = await http.post(f"{url}/a%2Fb?q=%20", json={"ä": 1})
        assert (answer.status_code, answer.reason_phrase, answer.content) == (
            200, "As It Is", b"body",
        )  # fmt: skip
        assert answer.headers["x-long"] == "x" * 20_000
        [(path, port, headers, body), (_, again, _, _)] = handler.seen
        assert (path, body) == ("/a%2Fb?q=%20", '{"ä":1}'.encode())
        assert headers["Authorization"] == "Bearer t" and headers["Host"] in url
        assert port == again  # the connection was kept


async def test_a_redirect_is_left_to_the_client() -> None:
    with server() as (url, handler):
        async with client() as http:
            answer = await http.post(f"{url}/elsewhere", json={})
            assert answer.status_code == 307
            assert answer.next_request is not None
            assert answer.next_request.url == f"{url}/here"
        assert len(handler.seen) == 1


async def test_a_kept_connection_that_the_server_closed_is_not_used() -> None:
    with server() as (url, handler):
        async with client() as http:
            for path in ("/last", "/first"):
                assert (await http.post(url + path, json={})).content == b"body"
                time.sleep(0.2)  # the loop learns nothing of the close, as when it is busy
        assert [path for path, *_ in handler.seen] == ["/last", "/first"]


async def test_what_a_server_sent_unasked_is_no_answer_to_the_next_request() -> None:
    with server() as (url, handler):
        async with client() as http:
            await http.post(f"{url}/twice", json={})
            await asyncio.sleep(0.2)  # the loop reads the second answer
            assert (await http.post(f"{url}/first", json={})).content == b"body"
        assert [path for path, *_ in handler.seen] == ["/twice", "/first"]


@pytest.mark.parametrize("path", ["/vanish", "/short"])
async def test_a_lost_answer_is_an_error_and_the_request_is_not_sent_again(path: str) -> None:
    with server() as (url, handler):
        async with client() as http:
            await http.post(url, json={})
            with pytest.raises(httpx2.RemoteProtocolError):
                await http.post(url + path, json={})
            await http.post(url, json={})
        assert [seen for seen, *_ in handler.seen] == ["/", path, "/"]


async def test_a_compressed_answer_is_refused_by_its_name() -> None:
    with server() as (url, _):
        async with client() as http:
            with pytest.raises(AnswerCompressed, match=r"a compressed answer \('gzip'\)"):
                await http.post(f"{url}/packed", json={})


async def test_a_server_that_is_not_there_is_a_connect_error() -> None:
    with server() as (url, _):
        pass
    async with client() as http:
        with pytest.raises(httpx2.ConnectError):
            await http.post(url, json={})
        with pytest.raises(httpx2.ConnectError):
            await http.post("http://no-such-host.invalid/", json={})
