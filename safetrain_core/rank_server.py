"""Imported by the server process that forks the ranks of a ``launch``, and nowhere else: it is to outlive signals.

A signal to the whole process group, as ``timeout`` and schedulers send it, is for the launching process, which hands it
on. Were the server ended by it, the launching process would lose sight of its ranks. It ends when that process does.
"""

import signal

from .launched import IGNORED

for name in IGNORED:
    if hasattr(signal, name):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
