"""Tests start children that are interrupted, so a signal that this process's shell ignores must not be ignored in them:
`nohup make test &` ignores both. A handler, unlike "ignore", is not inherited by a child."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
