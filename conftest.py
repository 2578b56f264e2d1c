"""Tests start children that are interrupted, so a signal that this process's shell ignores must not be ignored in them:
`nohup make test &` ignores both. A handler, unlike "ignore", is not inherited by a child.

The collector of reference cycles looks less often than Python's default, because each look at the objects of torch, jax
and transformers takes long: a sixth of the time of collecting the tests, and a twelfth of running them."""

import gc
import signal

gc.set_threshold(20_000, 10, 10)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
