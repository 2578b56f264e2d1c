"""Where the figures of a run go: a progress bar, a file of JSON lines, trackers, and a picture."""
