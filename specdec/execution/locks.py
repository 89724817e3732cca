"""One forward at a time per model: it switches the model's configuration and lends its layers packed weights."""

import threading
from weakref import WeakKeyDictionary

from torch import nn

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_guard = threading.Lock()


def model_lock(model: nn.Module) -> threading.RLock:
    """Returns the lock that every forward of this model holds, whichever engine runs it."""
    with _guard:
        if model not in _locks:
            _locks[model] = threading.RLock()
        return _locks[model]
