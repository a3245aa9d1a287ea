"""The HTTP design that is compared: a stdlib threaded server in another process that serves whole blobs from its memory."""

import contextlib
import multiprocessing
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path


class BlobServer:
    """Serves ``/0``, ``/1``, ... on loopback until it is closed."""

    def __init__(self, blobs: list[bytes], *, folder: Path) -> None:
        """``folder``: where the blobs are handed over to the process, as files."""
        for n, data in enumerate(blobs):
            (folder / f"{n}.blob").write_bytes(data)
        context = multiprocessing.get_context("spawn")
        self._stop, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(str(folder), len(blobs), theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.port: int = self._stop.recv()

    def close(self) -> None:
        """Stops the process."""
        self._stop.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(folder: str, count: int, stop: Connection) -> None:
    blobs = [(Path(folder) / f"{n}.blob").read_bytes() for n in range(count)]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = blobs[int(self.path.strip("/"))]
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:  # a line per request would be measured too
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    stop.send(server.server_address[1])
    with contextlib.suppress(EOFError):  # the other end is gone
        stop.recv()
    server.shutdown()
    thread.join()
    server.server_close()
