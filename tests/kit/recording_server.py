"""A server that only this machine can reach; it has one answer and remembers what it was asked."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RecordingServer(ThreadingHTTPServer):
    """Answers every request with `content`; `asked` are the paths."""

    def __init__(self, content: bytes):
        self.content, self.asked = content, list[str]()
        super().__init__(("127.0.0.1", 0), _Answer)


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        content = self.server.content  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def recording(content: bytes) -> Iterator[RecordingServer]:
    with RecordingServer(content) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
