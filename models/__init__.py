"""Flax language models on top of :mod:`mok_jax`: examples, run from a checkout and not installed with it."""

import signal
import sys

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # `python -m` is looking for a program here. While that is imported Ctrl-C ends the process, as for most programs:
    # Python's KeyboardInterrupt is lost if a callback of JAX's runs just then.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import mok_jax  # noqa: F401 - refuses a Python that cannot read what follows.
