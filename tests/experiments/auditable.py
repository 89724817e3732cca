"""A fake server that decodes as it is asked to, so that it can be audited."""

import json
from typing import Any

from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.experiments.contenders.test_openai import Handler, Server


class Endpoint(Server):
    """Samples as it is asked to, unless something is wrong with it: an error by the number of the request.

    Attributes:
        limits: Requests that are answered with 429.
        drops: Requests that get no answer.
        ignores: Fields that it does not look at.
    """

    def __init__(self, target: Target):
        super().__init__(target)
        self.RequestHandlerClass = Answers
        self.limits: set[int] = set()
        self.drops: set[int] = set()
        self.ignores: set[str] = set()
        self.retry_after = "0"


class Answers(Handler):
    """The endpoint's answers."""

    server: Endpoint  # type: ignore[assignment]

    def do_POST(self) -> None:  # noqa: N802 - named by http.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        given = {name: value for name, value in body.items() if name not in self.server.ignores}
        with self.server.lock:
            self.server.seen.append(body)
            number = len(self.server.seen)
            if number in self.server.drops:
                self.connection.close()
                return
            if number in self.server.limits:
                self.send_response(429)
                self.send_header("Retry-After", self.server.retry_after)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if body.get("n", 1) > 1:
                self.answer(400, {"error": "n must be 1"})
                return
            sampling = SamplingParams(
                temperature=given.get("temperature", 0.0),
                top_p=given.get("top_p", 1.0),
                seed=given.get("seed", 0),
                max_new_tokens=body["max_tokens"],
                ignore_eos=True,
            )
            done = self.server.engine.generate([body["prompt"]], sampling)[0]
        choice: dict[str, Any] = {"text": done.text, "finish_reason": done.finish_reason}
        if body.get("return_token_ids"):
            choice["token_ids"] = list(done.token_ids)
        self.answer(200, {"choices": [choice]})
