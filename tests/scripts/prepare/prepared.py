"""What the tests of preparations share: archives, a web server, and what a folder holds."""

import gzip
import io
import tarfile
import threading
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from types import SimpleNamespace

import fairseq_cli.preprocess
from fairseq import options
from fairseq.data import Dictionary, data_utils

SPLITS = ("train", "valid", "test")


def write_files(folder, files):
    """Write bytes, and texts, packed where a name ends with .gz, by their names in a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            pack = gzip.compress if path.suffix == ".gz" else bytes
            content = pack(content.encode())
        path.write_bytes(content)


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"folder/{name}", content)
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
    """URL of a server with files, by name, in any folder, and the names that it was asked for.

    Each connection breaks after so many bytes as ``cut`` says.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(PurePosixPath(self.path).name)
            content = files.get(asked[-1])
            # as one of the real hosts does
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
        yield f"http://127.0.0.1:{server.server_port}/folder", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lines(folder, split, dictionary="dict.txt"):
    """Items of a binarized split, as symbols with their </s>."""
    symbols = Dictionary.load(str(folder / dictionary))
    items = data_utils.load_indexed_dataset(str(folder / split), symbols)
    return [" ".join(symbols[token] for token in items[item]) for item in range(len(items))]


def contents(folder):
    """Bytes of all files but the records and logs, which hold names of folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("stage.json", "preprocess.log")
    }


def refused(result, *named):
    """Whether a command, or its parser, said in one line what is wrong, with all these words."""
    status, _, error = result
    message = error.splitlines()[-1]
    of_parser = status == 2 and "error: argument" in message
    one = of_parser or (status == 1 and error == f"{message}\n" and error.startswith("error: "))
    return one and all(str(word) in message for word in named)


@contextmanager
def in_this_process(words, log):
    """What child_process does for fairseq-preprocess, without the seconds of a new Python."""
    log.touch()
    logger = fairseq_cli.preprocess.logger
    before = list(logger.handlers)
    try:
        fairseq_cli.preprocess.main(options.get_preprocessing_parser().parse_args(words[1:]))
    finally:
        # it would go on writing its log
        for handler in set(logger.handlers).difference(before):
            logger.removeHandler(handler)
            handler.close()
    yield SimpleNamespace(poll=lambda: 0, returncode=0)
