"""Helpers of the preparation tests: archives, a web server, and the contents of folders."""

import gzip
import io
import tarfile
import threading
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath

import fairseq_cli.preprocess
from fairseq import options
from fairseq.data import Dictionary, data_utils

SPLITS = ("train", "valid", "test")


def write_files(folder, files):
    """Write named files of bytes or text into a folder; compress texts if a name ends with .gz."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            pack = gzip.compress if path.suffix == ".gz" else bytes
            content = pack(content.encode())
        path.write_bytes(content)


def zipped(members, folder="folder"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{folder}/{name}", content)
    return buffer.getvalue()


def tarred(members, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"folder/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@contextmanager
def serve(files, cut=None):
    """Serve files by name in any folder; yield the host and the list of requested names.

    Each connection breaks after ``cut`` bytes.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(PurePosixPath(self.path).name)
            content = files.get(asked[-1])
            # one of the real hosts also rejects Python's user agent
            if content is None or self.headers["User-Agent"].startswith("python"):
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:cut])

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lines(folder, split, dictionary="dict.txt"):
    """Return the items of a binarized split as symbols, with their </s>."""
    symbols = Dictionary.load(str(folder / dictionary))
    items = data_utils.load_indexed_dataset(str(folder / split), symbols)
    return [" ".join(symbols[token] for token in items[item]) for item in range(len(items))]


def contents(folder):
    """Return the bytes of all files except records and logs, which contain folder names."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("stage.json", "preprocess.log")
    }


def refused(result, *named):
    """Return whether a command or its parser failed with a one-line error that has these words."""
    status, _, error = result
    message = error.splitlines()[-1]
    usage = status == 2 and "error: argument" in message
    single = usage or (status == 1 and error == f"{message}\n" and error.startswith("error: "))
    return single and all(str(word) in message for word in named)


def in_this_process(words, log):
    """Do what run_child does for fairseq-preprocess, without starting a new Python."""
    log.touch()
    logger = fairseq_cli.preprocess.logger
    before = list(logger.handlers)
    try:
        fairseq_cli.preprocess.main(options.get_preprocessing_parser().parse_args(words[1:]))
    finally:
        # new handlers would continue to write into the log
        for handler in set(logger.handlers).difference(before):
            logger.removeHandler(handler)
            handler.close()
