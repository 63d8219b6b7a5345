"""Serve an ONNX file over HTTP: arrays in, arrays out, as .npz.

    python serve.py model.onnx --port 8000
    curl --data-binary @inputs.npz http://localhost:8000/ > outputs.npz

Needs numpy and onnxruntime.  It is an example: no encryption, no authentication, one request at a time.
"""

from __future__ import annotations

import argparse
import io
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import onnxruntime

LIMIT = 64 * 2**20  # bytes of a request


def handler_for(session: onnxruntime.InferenceSession) -> type[BaseHTTPRequestHandler]:
    """Return a request handler for one model."""
    names = [output.name for output in session.get_outputs()]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with the inputs of the model."""
            ports = "\n".join(f"{port.name} {port.type} {port.shape}" for port in session.get_inputs())
            self.answer(200, f"{ports}\n".encode())

        def do_POST(self) -> None:
            """Run the model on the arrays of the body."""
            size = int(self.headers.get("Content-Length", 0))
            if not 0 < size <= LIMIT:
                self.answer(413, f"send between 1 and {LIMIT} bytes\n".encode())
                return
            try:
                with np.load(io.BytesIO(self.rfile.read(size)), allow_pickle=False) as file:
                    feed = {name: file[name] for name in file.files}
                found = dict(zip(names, session.run(names, feed), strict=True))
            except Exception as error:  # what a client sends must not end the server
                self.answer(400, f"{type(error).__name__}: {error}\n".encode())
                return
            body = io.BytesIO()
            np.savez(body, **found)
            self.answer(200, body.getvalue())

        def answer(self, status: int, body: bytes) -> None:
            """Send a complete response."""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="Serve an ONNX model over HTTP.")
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--threads", type=int, default=0, help="inside one operator; 0 takes all cores")
    chosen = parser.parse_args()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = chosen.threads
    session = onnxruntime.InferenceSession(chosen.model, options, providers=onnxruntime.get_available_providers())
    with HTTPServer((chosen.host, chosen.port), handler_for(session)) as server:
        print(f"http://{chosen.host}:{server.server_port}/", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
