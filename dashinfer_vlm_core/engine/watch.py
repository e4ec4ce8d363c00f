"""The former name of `engine.observers`, until 0.3."""

from ..deprecation import warn_renamed
from . import observers

warn_renamed(__name__, observers.__name__, stacklevel=2)
Watcher = observers.RequestObserver
