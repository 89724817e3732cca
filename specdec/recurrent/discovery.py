"""Finds a model's recurrent layers: its own forward runs once, and whoever stores a state is one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec.cache.states import StateKey, StateShape, StateView
from specdec.recurrent.mixer import Forward, Given, Mixer, Path, forwards_replaced, part_at, replaced, tensors_in

ROWS, TOKENS = 3, 13
"""The size of the trial: numbers that are no size of a model, so that tensors with a row per row are known by them."""

_CUT = 5  # tokens of the first of two pieces

_APART = {torch.float32: 1e-3, torch.float64: 1e-6}
_APART_IN_HALF = 5e-2
"""Differences of numbers that count as equal, relative to the largest."""


class Attributes:
    """The attributes of a model's modules, which are put back after the ``with`` block."""

    def __init__(self, model: nn.Module):
        self._names = {module: name for name, module in model.named_modules()}
        self._before = {module: dict(vars(module)) for module in self._names}

    def __enter__(self) -> "Attributes":
        return self

    def __exit__(self, *error: object) -> None:
        for module, table in self._before.items():
            for name in [name for name, value in vars(module).items() if table.get(name) is not value]:
                setattr(module, name, table.get(name))

    def appeared(self, rows: int) -> dict[nn.Module, dict[StateKey, Tensor]]:
        """Return tensors with a row per row that have appeared since, by the outermost module that has any."""
        found: dict[nn.Module, dict[StateKey, Tensor]] = {}
        for module, name in self._names.items():  # parents stand before their children
            table = self._before[module]
            new = {
                StateKey("attribute", name, attribute): value
                for attribute, value in vars(module).items()
                if isinstance(value, Tensor) and table.get(attribute) is not value and value.shape[:1] == (rows,)
            }
            if new:
                owner = next((other for other in found if name.startswith(f"{self._names[other]}.")), module)
                found.setdefault(owner, {}).update(new)
        return found


def find_mixers(model: nn.Module, run: Callable[[], object], view: StateView) -> tuple[Mixer, ...]:
    """Return the recurrent layers of a model; ValueError if one cannot be run token by token.

    ``run`` runs its forward over ``ROWS`` rows of ``TOKENS`` tokens, in which ``view`` answers for the cache's states.
    """
    trace = _Trace(view)
    with Attributes(model) as attributes:
        trace.run(list(model.modules()), run)
        states = attributes.appeared(ROWS)
    for key, owner in trace.owners.items():
        states.setdefault(owner, {})[key] = view.now[key]
    names = {module: name for name, module in model.named_modules()}
    return tuple(_Trial(model, names[owner], kept, trace).mixer() for owner, kept in states.items())


class _Trace:
    """Notes the calls of all modules, and which of them was running when a state was stored."""

    def __init__(self, view: StateView):
        self._view = view
        self._stack: list[nn.Module] = []
        self.owners: dict[StateKey, nn.Module] = {}
        self.given: dict[nn.Module, Given] = {}
        self.result: dict[nn.Module, Any] = {}

    def run(self, modules: Sequence[nn.Module], forward: Callable[[], object]) -> None:
        """Run a forward and note it."""
        with ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            forward()

    def _look(self) -> None:
        for key in self._view.now.keys() - self.owners.keys():
            self.owners[key] = self._stack[-1]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._look()
        self._stack.append(module)
        self.given[module] = args, kwargs

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._look()
        self._stack.pop()
        self.result[module] = result


class _Trial:
    """Calls of one recurrent layer, which stored the states ``kept``, on the arguments that it had in a forward."""

    def __init__(self, model: nn.Module, name: str, kept: Mapping[StateKey, Tensor], trace: _Trace):
        self._model, self._module = model, model.get_submodule(name)
        self._given = trace.given[self._module]
        main = next(model.parameters()).device
        places = {key: None if state.device == main else state.device for key, state in kept.items()}
        states = {key: StateShape(tuple(each.shape[1:]), each.dtype, places[key]) for key, each in kept.items()}
        takes = [path for path, each in tensors_in(self._given) if each.shape[:2] in ((ROWS, TOKENS), (1, TOKENS))]
        gives = [path for path, each in tensors_in(trace.result[self._module]) if each.shape[:2] == (ROWS, TOKENS)]
        self._mixer = Mixer(name, states, tuple(takes), tuple(gives))

    def mixer(self) -> Mixer:
        """Return the layer as a value."""
        tried = self._mixer
        if not tried.takes or not tried.gives:
            raise ValueError(f"its layer {tried.name} keeps a state, and no token can be told from another in it")
        with tried.attributes_kept(self._model):
            pieces = self._continues(_CUT)
            # Rounded to 16 bits, one way may be as far from the other as a wrong one; logits are compared then.
            precise = next(self._model.parameters()).dtype in _APART
            if not pieces and precise and not self._continues(TOKENS - 1):
                raise ValueError(f"its layer {tried.name} gives other numbers behind a state than in one piece")
            projections, last = self._linears()
        return Mixer(tried.name, tried.states, tried.takes, tried.gives, not pieces, projections, last)

    def _run(self, parts: Mapping[Path, Tensor], view: StateView) -> tuple[Any, dict[StateKey, Tensor]]:
        given = replaced(self._given, parts)
        return self._mixer.call(self._model, self._module.forward, given, view)

    def _tokens(self, part: slice) -> dict[Path, Tensor]:
        return {path: part_at(self._given, path)[:, part].clone() for path in self._mixer.takes}

    def _continues(self, cut: int) -> bool:
        """Return whether the tokens from ``cut`` on give the same behind a state as in one piece with the others."""
        whole, states = self._run(self._tokens(slice(None)), StateView(None))
        _, before = self._run(self._tokens(slice(cut)), StateView(None))
        before = {key: state.clone() for key, state in before.items()}
        try:
            rest, after = self._run(self._tokens(slice(cut, None)), StateView(before))
        except (RuntimeError, IndexError, ValueError):  # of a layer that takes one token only
            return False
        pairs = [(part_at(rest, path), part_at(whole, path)[:, cut:]) for path in self._mixer.gives]
        pairs += [(after[key], states[key]) for key in states]
        return all(_equal(one, other) for one, other in pairs)

    def _linears(self) -> tuple[tuple[str, ...], tuple[str, Path] | None]:
        """Return the projections, and the last linear layer (see ``Mixer``)."""
        inputs = self._tokens(slice(None))
        others = {path: each.clone() for path, each in inputs.items()}
        for other in others.values():
            other[:, :-1] = other.roll(1, 0)[:, :-1]
        first, result = self._noted(inputs)
        second, _ = self._noted(others)
        once = [name for name, outputs in first.items() if len(outputs) == 1 and len(second[name]) == 1]
        early = [name for name in once if first[name][0][1] and first[name][0][0].shape[:2] == (ROWS, TOKENS)]
        projections = [name for name in early if _equal(first[name][0][0][:, -1], second[name][0][0][:, -1])]
        last = None
        for path in self._mixer.gives:
            ends = [name for name in once if first[name][0][0] is part_at(result, path) and name not in projections]
            last = (ends[0], path) if ends else last
        return tuple(projections), last

    def _noted(self, parts: Mapping[Path, Tensor]) -> tuple[dict[str, list[tuple[Tensor, bool]]], Any]:
        """Return the outputs of linear layers, each with whether it was before any state was stored, and the result."""
        view, noted = StateView(None), dict[str, list[tuple[Tensor, bool]]]()

        def note(name: str, own: Forward, inputs: Tensor) -> Tensor:
            output = own(inputs)
            noted.setdefault(name, []).append((output, not view.now))
            return output

        # Quantized ones are of other classes.
        linears = {name: each for name, each in self._module.named_modules() if hasattr(each, "out_features")}
        with forwards_replaced({each: partial(note, name, each.forward) for name, each in linears.items()}):
            result, _ = self._run(parts, view)
        return noted, result


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not other.numel():
        return one.shape == other.shape
    bound = _APART.get(other.dtype, _APART_IN_HALF) * max(float(other.abs().max()), 1e-30)
    return float((one - other).abs().max()) <= bound
