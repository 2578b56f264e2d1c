"""Files and batches of OpenAI's API: a bounded store of files on disk, and the execution of requests that stand in a
file, one a line, while clients of other endpoints come first."""
