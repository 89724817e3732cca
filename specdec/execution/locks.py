"""One forward at a time per model: ours switch its configuration and lend its layers packed weights meanwhile."""

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
