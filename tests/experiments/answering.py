"""A server's handler that answers in JSON and keeps silent."""

import json
from http.server import BaseHTTPRequestHandler
from typing import Any


class AnsweringHandler(BaseHTTPRequestHandler):
    """What fake servers share."""

    def answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""
