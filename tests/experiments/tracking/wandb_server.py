"""A stand-in for wandb's server on this machine: it knows one account, takes runs, and remembers what it was sent.

It speaks the part of the protocol that wandb's client needs to log in, begin a run, send its history and summary, and
end it: a few GraphQL operations, told apart by their names, and the file stream. A ``manner`` makes it misbehave.
"""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ACCOUNT = {"id": "account", "entity": "team", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}


class StandIn:
    """What the server was sent.

    Attributes:
        manner: ``"good"``; ``"stranger"``: it does not know the key; ``"broken"``: it answers everything with an error
            500; ``"silent"``: it never answers.
        runs: The variables of every request that began or changed a run.
        operations: Names of the GraphQL operations, in order.
        stream: For every file of the file stream, its lines.
        exit_code: Exit code of a run that has ended.
        uploads: Names of files that were uploaded.
        artifacts: Name and type of every artifact.
    """

    def __init__(self, manner: str):
        self.manner = manner
        self.url = ""
        self.runs: list[dict[str, Any]] = []
        self.operations: list[str] = []
        self.stream: dict[str, list[str]] = {}
        self.exit_code: int | None = None
        self.uploads: list[str] = []
        self.artifacts: list[tuple[str, str]] = []
        self.released = threading.Event()

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL operation's answer."""
        self.operations.append(operation)
        if operation == "Viewer":
            return {"viewer": ACCOUNT if self.manner == "good" else None}
        if operation == "UpsertBucket":
            self.runs.append(variables)
            project = {"id": "project", "name": variables["project"], "entity": {"id": "team", "name": "team"}}
            bucket = {"id": "run", "name": variables["name"], "displayName": variables["displayName"]}
            bucket |= {"config": "{}", "historyLineCount": 0, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": len(self.runs) == 1}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        if operation == "CreateArtifact":
            self.artifacts.append(
                (variables["input"]["artifactCollectionName"], variables["input"]["artifactTypeName"])
            )
            # "Committed": the server has such a one already, so that the client need not upload its files.
            artifact: dict[str, Any] = {"id": f"artifact{len(self.artifacts)}", "state": "COMMITTED"}
            return {
                "createArtifact": {"artifact": {**artifact, "artifactSequence": {"id": "all", "latestArtifact": None}}}
            }
        if operation == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        # The client asks whether there is an artifact of a table's name; it knows none.
        return {"project": None}

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of one file of the file stream."""
        return [json.loads(line) for line in self.stream.get(name, [])]

    def take_stream(self, sent: dict[str, Any]) -> None:
        for name, part in (sent.get("files") or {}).items():
            self.stream.setdefault(name, []).extend(part["content"])
        if sent.get("complete"):
            self.exit_code = sent.get("exitcode")


@contextmanager
def stand_in(manner: str = "good") -> Iterator[StandIn]:
    """Run a server while the block runs."""
    state = StandIn(manner)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            self.reply({})

        def do_PUT(self) -> None:
            self.body()
            state.uploads.append(self.path.removeprefix("/upload/"))
            self.reply({})

        def do_POST(self) -> None:
            body = self.body()
            if self.path.startswith("/sdk/otel"):
                self.reply({})  # the client's own telemetry
            elif state.manner == "silent":
                state.released.wait(120)
            elif state.manner == "broken":
                self.reply({"errors": [{"message": "out of order"}]}, 500)
            elif self.path == "/graphql":
                asked = json.loads(body)
                self.reply({"data": state.answer(asked.get("operationName", ""), asked.get("variables") or {})})
            else:
                if self.path.endswith("/file_stream"):
                    state.take_stream(json.loads(body))
                self.reply({})

        def body(self) -> bytes:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(sent) if self.headers.get("Content-Encoding") == "gzip" else sent

        def reply(self, content: dict[str, Any], status: int = 200) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that ends in the middle of a connection is no error."""

    server = Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
