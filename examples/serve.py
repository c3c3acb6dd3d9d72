"""A model of `imageshards train` behind HTTP: POST a photo, get {class: probability}.

python examples/serve.py RUN PORT
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import imageshards

RUN = imageshards.load_run(sys.argv[1])
MAX_BYTES = 32 << 20


class Server(ThreadingHTTPServer):
    """A thread for each connection."""

    request_queue_size = 1024  # clients that may come at once; 5 by default


class Service(BaseHTTPRequestHandler):
    """Answers one client."""

    timeout = 30  # seconds without a byte, after which a client is given up

    def do_POST(self):
        size = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", size) or not 0 < int(size) <= MAX_BYTES:
            return self.answer(413, {"error": f"send a photo of 1 to {MAX_BYTES} bytes"})
        try:
            pixels = RUN.decode(self.rfile.read(int(size)))
        except ValueError as error:
            return self.answer(400, {"error": str(error)})
        probabilities = RUN.probabilities(pixels[None])[0]
        self.answer(200, dict(zip(RUN.classes, probabilities.tolist(), strict=True)))

    def answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


Server(("127.0.0.1", int(sys.argv[2])), Service).serve_forever()
