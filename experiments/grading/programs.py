"""From what a model wrote to a program that tests it.

The answer of a chat model is its first block of code that has the function. Any other output continues the task's own
text, and ends where the model goes on to something new (the stop sequences of Chen et al. 2021, arXiv 2107.03374).
"""

import re

from experiments.grading.references import Function, Snippet

_BLOCK = re.compile(r"```[ \t]*\w*[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_FUNCTION_ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\n@", "\n```")
_SNIPPET_ENDS = ("\nassert ", "\nprint", '\n"""', "\nif __name__", "\n```", "[DONE]")


def program_of(reference: Function | Snippet, output: str) -> str:
    """The program that ends without an error if the output is right."""
    return _function(reference, output) if isinstance(reference, Function) else _snippet(reference, output)


def _function(reference: Function, output: str) -> str:
    defined = re.compile(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(reference.name)}\b", re.MULTILINE)
    blocks = _BLOCK.findall(output)
    code = next((block for block in [*blocks, output] if defined.search(block)), None)
    if code is not None:
        # What stands above the function in the task: imports, and functions that its text refers to.
        start = defined.search(reference.header)
        program = (reference.header[: start.start()] if start else "") + "\n" + code
    else:
        body = blocks[0] if blocks else output
        program = reference.header + _until(body, _FUNCTION_ENDS)
    return f"{program}\n\n{reference.test}\n\ncheck({reference.name})\n"


def _snippet(reference: Snippet, output: str) -> str:
    blocks = _BLOCK.findall(output)
    code = next((block for block in blocks if "def " in block), blocks[0] if blocks else _until(output, _SNIPPET_ENDS))
    return "\n".join([reference.setup, code, *reference.tests]) + "\n"


def _until(text: str, ends: tuple[str, ...]) -> str:
    places = [place for end in ends if (place := text.find(end)) >= 0]
    return text[: min(places, default=len(text))]
