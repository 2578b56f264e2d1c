"""`ttpu new-plugin`: the files of a new family plugin."""
