"""A local web server whose mirrors can refuse, stall, ignore ranges and break connections."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath


@dataclass
class FileServer:
    """What a server has and does, and the requests that it got as (path, range)."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    # bytes of content after which each connection breaks
    cut: int | None = None
    # added to where a range begins
    shift: int = 0
    # whether connections stay open after their content, until the server ends
    stalls: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str | None]] = field(default_factory=list)


@contextmanager
def serve(files, **behaviour):
    """Serve the contents of files, by name, at any folder below the server's URL."""
    state = FileServer(files=files, **behaviour)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked = self.headers["Range"]
            state.requests.append((self.path, asked))
            if self.headers["User-Agent"].startswith("Python"):
                self.send_error(403)
                return
            content = state.files.get(PurePosixPath(self.path).name)
            if content is None:
                self.send_error(404)
                return
            start = int(asked[len("bytes=") : -1]) if asked and state.ranges else 0
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                start += state.shift
                whole = len(content)
                self.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
            content = content[start:]
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: state.cut])
            if state.stalls:
                state.ended.wait()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        state.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
