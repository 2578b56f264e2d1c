"""Starts one program as several processes, here or on other machines, and tells each of them its place."""
